"""Where servers come from and what happens to them, with small processes in place of vLLM."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import lives, supervisor
from dapo_megatron.rollout.checks import UnreachableError, check_server
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.server import Server as Process
from dapo_megatron.rollout.server import free_port, stop_server, wait_until_healthy
from dapo_megatron.rollout.supervisor import Supervisor
from tests import stub_server
from tests.processes import gone_within, is_alive
from tests.stub_server import stub
from tests.unit.config_helpers import write_config, write_model

SECONDS = 45.0
STUB = Path(stub_server.__file__)
FLEET = {"health_every": 0.1, "stall_timeout": 1.5, "start_timeout": 30, "kv_cache_gb": 0.03}


class Engine:
    """No answers here."""

    async def abort(self, server: Server, request_ids: Any) -> None:
        pass


def run_stub(port: int, log_path: Path) -> Process:
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(STUB), str(port)], stdout=log, stderr=log, start_new_session=True
        )
    return Process(0, process, "127.0.0.1", port, log_path)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations; keyword arguments go into the fleet's section."""
    write_model(tmp_path / "model")
    return lambda **fleet: load_config(write_config(tmp_path, fleet=FLEET | fleet))


class Bench:
    """A supervisor, its fleet and its records, and every process that was started for it, by server."""

    def __init__(self, config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.folder = config, folder
        self.started: dict[int, list[Process]] = {}
        self.refusal: str | None = None
        self.status: list[tuple[int, int, str]] = []
        self._watch: asyncio.Task[None] | None = None
        monkeypatch.setattr(supervisor, "start", self._start)
        monkeypatch.setattr(lives, "WATCH_SECONDS", 0.05)
        monkeypatch.setattr(lives, "PAUSE_SECONDS", 0.1)
        # One that a test has frozen does not hear that it is to end.
        monkeypatch.setattr(lives, "stop_server", partial(stop_server, grace=0.5))

    def _start(self, config: Config, index: int, token: str, *, first_gpu: int, restarts: int) -> Process:
        if self.refusal is not None:
            raise UserError(self.refusal)
        assert threading.current_thread() is threading.main_thread()
        processes = self.started.setdefault(index, [])
        assert restarts == len(processes)
        processes.append(run_stub(free_port("127.0.0.1"), self.folder / f"server_{index}.{restarts}.log"))
        return processes[-1]

    @asynccontextmanager
    async def running(self, *, joined: bool = True) -> AsyncIterator[Supervisor]:
        records = Records(self.folder / "records")
        self.fleet = Fleet(Engine(), self.config.fleet, records)  # type: ignore[arg-type]
        self.supervisor = Supervisor(
            self.config, self.fleet, records, stub_server.TOKEN, lambda *status: self.status.append(status)
        )
        self.fleet.on_suspect = self.supervisor.suspect
        try:
            self.supervisor.start()
            if joined:
                await self.supervisor.all_joined()
                self._watch = asyncio.create_task(self.supervisor.watch())
            yield self.supervisor
        finally:
            if self._watch is not None:
                self._watch.cancel()
            await self.supervisor.close()
            await self.supervisor.close()  # twice does no harm
            for process in (process for group in self.started.values() for process in group):
                assert gone_within(process.process.pid, 5)

    async def until(self, wanted: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(SECONDS):
            while not wanted():
                assert not self.watch.done(), f"{what}: {self.watch.exception()}"
                await asyncio.sleep(0.02)

    @property
    def watch(self) -> asyncio.Task[None]:
        assert self._watch is not None
        return self._watch

    def states(self) -> dict[str, str]:
        return {member.id: member.state for member in self.fleet.members()}

    def history(self, id: str) -> list[str]:
        return [r["state"] for r in read_records(self.folder / "records") if r["kind"] == "server" and r["id"] == id]

    async def push(self, version: int) -> None:
        await self.supervisor.hold("wait")
        self.supervisor.release(version, self.supervisor.healthy())


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    return lambda **fleet: Bench(make_config(**fleet), tmp_path, monkeypatch)


async def test_a_killed_server_is_started_again_and_joins(bench: MakeBench) -> None:
    b = bench(servers=2)
    async with b.running():
        assert b.states() == {"server_0": "joining", "server_1": "joining"}
        await b.push(1)
        assert b.states() == {"server_0": "ready", "server_1": "ready"}
        old = b.supervisor.healthy()[0]
        b.started[0][0].process.kill()
        await b.until(lambda: len(b.states()) == 1, "removal")
        await b.until(lambda: len(b.states()) == 2, "return")
        assert [server.id for server in b.supervisor.joining()] == ["server_0"]
        new = b.supervisor.joining()[0]
        assert new.url == b.started[0][1].url != old.url
        b.supervisor.admitted(old, 1)  # what was meant for the one before
        assert b.states()["server_0"] == "joining"
        b.supervisor.admitted(new, 1)
        assert b.states() == {"server_1": "ready", "server_0": "ready"}
    assert b.history("server_0") == ["started", "joining", "ready", "removed", "restarted", "joining", "ready"]
    assert b.history("server_1") == ["started", "joining", "ready"]
    assert b.status[-1][1] == 2


async def test_a_push_counts_only_for_the_server_that_got_it(bench: MakeBench) -> None:
    b = bench()
    async with b.running():
        servers = b.supervisor.healthy()
        b.started[0][0].process.kill()
        await b.until(lambda: bool(b.supervisor.healthy()) and b.supervisor.healthy() != servers, "return")
        b.supervisor.release(3, servers)
        assert b.states() == {"server_0": "joining"}
        b.supervisor.release(3, b.supervisor.healthy())
        assert b.states() == {"server_0": "ready"}


async def test_a_run_without_servers_tells_what_happened_to_each(bench: MakeBench) -> None:
    b = bench(servers=2, max_restarts=1)
    async with b.running():
        b.started[1][0].process.kill()
        await b.until(lambda: len(b.started[1]) == 2, "restart")
        await b.until(lambda: len(b.states()) == 2, "return")
        b.started[1][1].process.kill()
        await b.until(lambda: len(b.states()) == 1, "removal")
        await asyncio.sleep(0.3)
        assert not b.watch.done()  # one is left
        for restart in range(2):
            await b.until(lambda restart=restart: len(b.started[0]) == restart + 1, "restart")  # type: ignore[misc]
            b.started[0][restart].process.kill()
        with pytest.raises(RuntimeError, match="no vLLM server is left") as failure:
            await asyncio.wait_for(b.watch, SECONDS)
    text = str(failure.value)
    for index in range(2):
        assert f"vLLM server_{index}: it ended with code -9; the end of {b.started[index][1].log_path}" in text or (
            f"vLLM server {index} ended with code -9 while starting" in text  # killed before it answered
        )


async def test_a_frozen_server_is_taken_out_and_back_when_it_goes_on_in_time(bench: MakeBench) -> None:
    b = bench(servers=2, stall_timeout=2.0)
    async with b.running():
        await b.push(1)
        frozen = b.started[0][0].process
        frozen.send_signal(signal.SIGSTOP)
        await b.until(lambda: "server_0" not in b.states(), "removal")
        frozen.send_signal(signal.SIGCONT)
        await b.until(lambda: b.states().get("server_0") == "joining", "return")
        assert len(b.started[0]) == 1
    assert b.history("server_0") == ["started", "joining", "ready", "removed", "joining"]


async def test_a_server_that_stays_frozen_is_killed_and_started_again(bench: MakeBench) -> None:
    b = bench(servers=1)
    async with b.running():
        frozen = b.started[0][0].process
        frozen.send_signal(signal.SIGSTOP)
        await b.until(lambda: len(b.started[0]) == 2, "restart")
        assert not is_alive(frozen.pid)
        await b.until(lambda: b.states() == {"server_0": "joining"}, "return")


async def test_a_frozen_server_that_cannot_be_started_again_is_waited_for(bench: MakeBench) -> None:
    b = bench(servers=2, max_restarts=0)
    async with b.running():
        frozen = b.started[0][0].process
        frozen.send_signal(signal.SIGSTOP)
        await b.until(lambda: "server_0" not in b.states(), "removal")
        await asyncio.sleep(1.5)  # longer than one that can be started again would have
        assert is_alive(frozen.pid)
        assert not b.watch.done()
        frozen.send_signal(signal.SIGCONT)
        await b.until(lambda: "server_0" in b.states(), "return")
        frozen.send_signal(signal.SIGSTOP)
        await b.until(lambda: "server_0" not in b.states(), "removal")
        frozen.kill()
        b.started[1][0].process.kill()
        with pytest.raises(RuntimeError, match="no vLLM server is left"):
            await asyncio.wait_for(b.watch, SECONDS)


async def test_a_server_that_fails_answers_though_it_is_healthy_is_started_again(bench: MakeBench) -> None:
    b = bench(servers=1)
    async with b.running():
        await b.push(1)
        b.fleet.on_suspect("server_0", "3 failures in a row")
        b.fleet.on_suspect("server_0", "3 failures in a row")
        await b.until(lambda: len(b.started[0]) == 2 and b.states() == {"server_0": "joining"}, "restart")
        b.supervisor.failed("server_0", "late")
        assert b.states() == {}  # at once: the next attempt of a push must not have it
        await b.until(lambda: len(b.started[0]) == 3 and b.states() == {"server_0": "joining"}, "restart")
        b.supervisor.failed("nobody", "unknown")
    assert b.history("server_0")[:5] == ["started", "joining", "ready", "removed", "restarted"]


async def test_a_suspected_server_that_generates_stays(bench: MakeBench) -> None:
    with stub(generates=True) as url, stub() as other:
        b = bench(mode="external", urls=[url, other])
        async with b.running():
            first, second = (address.removeprefix("http://") for address in (url, other))
            for id in (first, second):
                b.fleet.on_suspect(id, "no token for a while")
            await b.until(lambda: second not in b.states(), "removal")
            await b.until(lambda: second in b.states(), "return")
            assert b.history(first) == ["joining"]


async def test_a_suspected_server_that_is_full_stays(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look waits in turn behind answers, of which tokens come: it fails, and the server is healthy."""
    with stub() as url:
        b = bench(mode="external", urls=[url])
        async with b.running() as servers:
            members, id = b.fleet.members, url.removeprefix("http://")
            for quiet in (0.0, 60.0):
                told = [replace(member, answers=1, oldest=70.0, quiet=quiet) for member in members()]
                monkeypatch.setattr(b.fleet, "members", lambda told=told: told)
                servers.suspect(id, "3 failures in a row")
                await b.until(lambda: not servers._looks, "look")
                assert (b.history(id) == ["joining"]) == (quiet == 0.0)
            monkeypatch.setattr(b.fleet, "members", members)


async def test_a_restart_that_is_refused_uses_up_a_restart(bench: MakeBench) -> None:
    """And a run in which no server can come back ends at once."""
    b = bench(servers=1, max_restarts=1, start_timeout=2 * SECONDS)
    async with b.running():
        b.refusal = "port 1 is in use"
        b.started[0][0].process.kill()
        with pytest.raises(RuntimeError, match="no vLLM server is left"):
            await asyncio.wait_for(b.watch, SECONDS)


async def test_a_server_that_never_starts_ends_the_run(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(servers=2, start_timeout=0.3)
    async with b.running(joined=False) as servers:
        b.started[1][0].process.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=r"was not ready after 0.3 s \(fleet.start_timeout\)"):
            await servers.all_joined()
    b = bench(servers=1)
    b.refusal = "port 1 is in use"
    with pytest.raises(UserError, match="port 1 is in use"):
        async with b.running():
            pass


@contextmanager
def external(log: Path, port: int | None = None) -> Iterator[Process]:
    process = run_stub(port or free_port("127.0.0.1"), log)
    try:
        wait_until_healthy(process, SECONDS)
        yield process
    finally:
        process.process.kill()
        process.process.wait()


async def test_an_external_server_that_is_gone_is_taken_back_when_it_answers_again(
    bench: MakeBench, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with external(log) as one, external(log) as two:
        b = bench(mode="external", urls=[one.url, f"{two.url}/"], stall_timeout=4)
        ids = [url.removeprefix("http://") for url in (one.url, two.url)]
        async with b.running():
            assert b.states() == dict.fromkeys(ids, "joining")
            await b.push(2)
            one.process.kill()
            await b.until(lambda: list(b.states()) == ids[1:], "removal")
            with external(log, one.port):
                await b.until(lambda: b.states().get(ids[0]) == "joining", "return")
            await b.until(lambda: list(b.states()) == ids[1:], "removal")
            assert not b.started
        assert is_alive(two.process.pid)  # it is not ours


async def test_servers_join_and_leave_with_the_lines_of_a_file(
    bench: MakeBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, file = tmp_path / "log", tmp_path / "urls"
    with external(log) as one, external(log) as two:
        file.write_text(f"# fleet\n{one.url}\n\n")
        b = bench(mode="external", urls_file=str(file))
        async with b.running():
            await b.push(1)
            file.write_text(f"{one.url}\n{two.url}\n")
            await b.until(lambda: list(b.states().values()) == ["ready", "joining"], "join")
            file.write_text("nonsense\n")
            await asyncio.sleep(0.3)
            assert len(b.states()) == 2  # a file that cannot be read changes nothing
            file.write_text(f"{two.url}\n")
            await b.until(lambda: list(b.states().values()) == ["joining"], "leave")
            (before,) = b.supervisor.healthy()
            file.write_text(f"{one.url}\n")
            await b.until(lambda: list(b.states()) == [one.url.removeprefix("http://")], "leave")
            file.write_text(f"{two.url}\n")
            await b.until(lambda: list(b.states()) == [two.url.removeprefix("http://")], "return")
            assert b.supervisor.healthy()[0] != before  # nobody may take it for the one that was there
            file.write_text("# the last node is being stopped\n")
            await asyncio.sleep(0.3)
            assert len(b.states()) == 1
            assert not b.watch.done()
            assert caplog.text.count("names no server; the servers stay as they are") == 1
        assert b.history(one.url.removeprefix("http://"))[-1] == "removed"


async def test_a_server_added_in_a_run_that_is_unfit_or_never_answers_is_not_needed(
    bench: MakeBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither ends the run, and neither keeps it waiting for servers when the others are gone."""
    file, log = tmp_path / "urls", tmp_path / "log"
    with external(log) as one, stub(answers=stub_server.replies(workers=2)) as unfit:
        file.write_text(f"{one.url}\n")
        b = bench(mode="external", urls_file=str(file), start_timeout=1.5)
        async with b.running():
            file.write_text(f"{one.url}\n{unfit}\nhttp://127.0.0.1:{free_port('127.0.0.1')}\n")
            await b.until(lambda: "cannot join: fleet.urls_file" in caplog.text, "refusal")
            await asyncio.sleep(0.3)
            assert not b.watch.done()
            one.process.kill()
            with pytest.raises(RuntimeError, match=r"(?s)no vLLM server is left.*has 2 workers.*not answered yet"):
                await asyncio.wait_for(b.watch, SECONDS)


async def test_external_servers_that_stay_away_end_the_run(bench: MakeBench, tmp_path: Path) -> None:
    with external(tmp_path / "log") as one:
        b = bench(mode="external", urls=[one.url], start_timeout=0.5)
        async with b.running():
            one.process.kill()
            with pytest.raises(RuntimeError, match=r"no vLLM server is left.*\n.*nothing listens at its address"):
                await asyncio.wait_for(b.watch, SECONDS)
        async with b.running(joined=False) as servers:
            with pytest.raises(
                UserError, match=rf"servers 127\.0\.0\.1:{one.port} do not answer \(fleet.start_timeout"
            ):
                await servers.all_joined()


async def test_gpus_of_a_server_come_after_those_of_the_trainer(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []
    b = bench(servers=2, tensor=2, pipeline=2)
    start = b._start

    def remember(*arguments: Any, first_gpu: int, **options: Any) -> Process:
        first.append(first_gpu)
        return start(*arguments, first_gpu=first_gpu, **options)

    monkeypatch.setattr(supervisor, "start", remember)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    async with b.running(joined=False):
        assert first == [4, 8]
    first.clear()
    b.started.clear()
    b.config.fleet.first_gpu = 0
    async with b.running(joined=False):
        assert first == [0, 4]


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"guarded": False}, r"fleet\.urls: server http://\S+ opens without its token"),
        ({"answers": stub_server.replies(workers=2)}, r"has 2 workers, but fleet\.tensor=1 x fleet\.pipeline=1 is 1"),
        ({"answers": stub_server.replies(length=100)}, "was started for 100 tokens, but a sequence .* may have 101"),
        ({"answers": stub_server.replies(version="0.31.0")}, "0.31.0"),
        ({"answers": {}}, "answers GET /version with 404"),
        ({"answers": stub_server.replies() | {"/v1/models": {}}}, "does not answer as vLLM does: a reply has no data"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_config: Callable[..., Config], attributes: dict[str, Any], told: str
) -> None:
    fleet = make_config().fleet
    with stub(**attributes) as url, pytest.raises((UserError, UnreachableError), match=told):
        check_server(url, stub_server.TOKEN, fleet, 101, "fleet.urls")


def test_a_fitting_server_passes_and_an_untested_version_is_told(make_config: Callable[..., Config]) -> None:
    fleet = make_config().fleet
    with stub() as url:
        assert check_server(url, stub_server.TOKEN, fleet, 256, "fleet.urls") is None
        with pytest.raises(UserError, match=r"refuses the token \(fleet\.token_env\)"):
            check_server(url, "another", fleet, 256, "fleet.urls")
    with stub(answers=stub_server.replies(version="0.99.1")) as url:
        assert "0.99.1" in str(check_server(url, stub_server.TOKEN, fleet, 256, "fleet.urls"))
    told = pytest.raises(UnreachableError, match="answers GET /version with 404")
    with stub(answers={"/get_world_size": {}}, health_body=b"<html>") as url, told:  # no vLLM
        check_server(url, stub_server.TOKEN, fleet, 256, "fleet.urls")
    with stub(health=503) as url, pytest.raises(UnreachableError, match="answers GET /health with 503"):
        check_server(url, stub_server.TOKEN, fleet, 256, "fleet.urls")
    with pytest.raises(UnreachableError, match="does not answer"):
        check_server(url, stub_server.TOKEN, fleet, 256, "fleet.urls")


async def test_an_unhealthy_server_is_taken_out_at_once(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub() as url:
        b = bench(mode="external", urls=[url], stall_timeout=600)
        async with b.running():
            with monkeypatch.context() as patch:
                patch.setattr(stub_server.Stub, "health", 503)
                await b.until(lambda: not b.states(), "removal")
            await b.until(lambda: len(b.states()) == 1, "return")


async def test_an_external_server_that_does_not_fit_ends_the_run_at_its_start(bench: MakeBench) -> None:
    with stub(answers=stub_server.replies(workers=2)) as url:
        b = bench(mode="external", urls=[url])
        async with b.running(joined=False) as servers:
            with pytest.raises(UserError, match="has 2 workers"):
                await servers.all_joined()
