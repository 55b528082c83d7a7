"""Servers on the trainer's GPUs: they are started only while the trainer has given up its memory, and join asleep."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dapo_megatron.rollout import lives, supervisor
from dapo_megatron.rollout.checks import UnreachableError
from dapo_megatron.rollout.fleet import Answer, AnswerGroup
from dapo_megatron.rollout.pushes import Pushes
from dapo_megatron.rollout.requests import Sampling, Server
from dapo_megatron.rollout.server import Server as Process
from dapo_megatron.types import Prompt
from tests.stub_server import TOKEN, stub
from tests.unit import test_supervisor
from tests.unit.test_supervisor import Bench, MakeBench, bench, make_config

__all__ = ["bench", "make_config"]  # fixtures
QUIET = 0.5  # seconds in which nothing is to happen
STUB = """
import sys
from http.server import ThreadingHTTPServer
from tests.stub_server import Stub

class Sleepy(Stub):
    def do_POST(self):
        print(self.path, flush=True)
        self._send(200, b'{"status": "sleeping"}')

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Sleepy).serve_forever()
"""


def run_sleepy(port: int, log_path: Path) -> Process:
    with log_path.open("wb") as log:
        command = [sys.executable, "-c", STUB, str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return Process(0, process, "127.0.0.1", port, log_path)


@pytest.fixture(autouse=True)
def servers_that_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(test_supervisor, "run_stub", run_sleepy)
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.02)


def starts(b: Bench) -> list[int]:
    return [len(b.started[index]) for index in range(2)]


def end(b: Bench, *indexes: int) -> None:
    for index in indexes:
        b.started[index][-1].process.send_signal(signal.SIGKILL)


async def lost(b: Bench, *left: str) -> None:
    await b.until(lambda: set(b.states()) == set(left), f"only {left} are left")
    await b.until(lambda: len(b.supervisor._waiting) == 2 - len(left), "the others wait for room")


def serving(b: Bench) -> Callable[[], bool]:
    return lambda: set(b.states()) == {"server_0", "server_1"}


async def test_a_server_joins_asleep(bench: MakeBench) -> None:
    b = bench(mode="colocated")
    async with b.running():
        for index in range(2):
            assert b.started[index][0].log_path.read_text().split() == ["/sleep?level=2"]
        assert b.states() == {"server_0": "joining", "server_1": "joining"}


async def test_a_server_of_other_gpus_stays_awake(bench: MakeBench) -> None:
    b = bench(servers=1)
    async with b.running():
        assert b.started[0][0].log_path.read_text() == ""


async def test_a_server_that_does_not_sleep_does_not_join(bench: MakeBench) -> None:
    with stub(do_POST=lambda self: self._send(200, b'{"status": "awake"}')) as url:
        b = bench(mode="colocated")
        async with b.running():
            life = b.supervisor._managed()[0]
            with pytest.raises(UnreachableError, match=r"POST /sleep\?level=2: .*'awake' instead of 'sleeping'"):
                await b.supervisor.join(life, Server("server_9", url, TOKEN))
            assert "server_9" not in b.states()


async def test_a_server_that_dies_while_the_trainer_trains_comes_back_in_the_push(bench: MakeBench) -> None:
    b = bench(mode="colocated")
    async with b.running():
        await b.push(1)
        end(b, 1)
        await lost(b, "server_0")
        b.supervisor.joining()  # the trainer may wait for answers: the other server gives them
        await asyncio.sleep(QUIET)
        assert starts(b) == [1, 1]
        await asyncio.wait_for(b.supervisor.hold("wait"), test_supervisor.SECONDS)
        assert starts(b) == [1, 2]
        assert b.states() == {"server_0": "ready", "server_1": "joining"}  # the push reaches both
        assert b.started[1][1].log_path.read_text().split() == ["/sleep?level=2"]


async def test_a_push_waits_until_all_that_died_are_back(bench: MakeBench) -> None:
    """Also when the fleet's answers could not be waited for, as no server is left that could give them."""
    b = bench(mode="colocated")
    async with b.running():
        await b.push(1)
        end(b, 0, 1)
        await lost(b)
        await asyncio.sleep(QUIET)
        assert starts(b) == [1, 1]
        failures: list[BaseException] = []

        async def settled() -> None:
            pass

        pushes = Pushes(b.supervisor, "wait", settled, failures.append)
        pushes.begin(0, 2)
        servers = await pushes.servers(0, 0, test_supervisor.SECONDS)
        assert servers is not None
        assert sorted(server.id for server in servers) == ["server_0", "server_1"]
        assert failures == []


async def test_when_none_is_left_to_answer_one_is_started(bench: MakeBench) -> None:
    b = bench(mode="colocated")
    async with b.running():
        await b.push(1)
        end(b, 0, 1)
        await lost(b)
        b.supervisor.joining()
        await asyncio.sleep(QUIET)
        assert starts(b) == [1, 1]  # what was answered is graded: the trainer may begin at any moment
        group = AnswerGroup(0, Prompt(0, (1, 2), ""), 1, Sampling(max_tokens=4))
        waiting = asyncio.create_task(b.fleet.answer(Answer(group, 0, "answer")))
        await asyncio.sleep(0)
        for _ in range(3):  # as many times as ranks ask
            b.supervisor.joining()
        await b.until(lambda: len(b.states()) == 1, "one joins")
        assert len(b.supervisor.joining()) == 1
        await asyncio.sleep(QUIET)
        assert sorted(starts(b)) == [1, 2]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not b.fleet.waits
        await b.supervisor.hold("wait")
        assert serving(b)()


async def test_a_push_does_not_wait_for_a_server_that_cannot_be_started_again(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(mode="colocated", max_restarts=1)
    async with b.running():
        await b.push(1)
        end(b, 1)
        await lost(b, "server_0")
        monkeypatch.setattr(lives, "wait_until_healthy", partial(_never, "out of memory"))
        await asyncio.wait_for(b.supervisor.hold("wait"), test_supervisor.SECONDS)
        assert starts(b) == [1, 2]
        assert [server.id for server in b.supervisor.healthy()] == ["server_0"]


def _never(reason: str, *_: object) -> None:
    raise UnreachableError(reason)
