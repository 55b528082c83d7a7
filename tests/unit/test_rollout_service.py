"""The controller's HTTP interface, through the trainer's handle, with batches made up here instead of by servers."""

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web

from dapo_megatron.config.load import load_config
from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.address import Address
from dapo_megatron.rollout.blocks import BatchTokens, select
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, StopRun
from dapo_megatron.rollout.jobs import Admission, BudgetExhaustedError
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.service import Service
from dapo_megatron.types import BatchHeader
from tests.unit.config_helpers import write_config, write_model
from tests.unit.test_blocks import assert_same, make_batch

TOKEN = "secret"


class ScriptedWork:
    """Batches of `make_batch`; an exception given for a step is raised; the batch of a step in `slow` has to wait."""

    def __init__(self) -> None:
        self.failures: dict[int, Exception] = {}
        self.slow: dict[int, asyncio.Event] = {}
        self.sampled: list[tuple[int, int, int]] = []
        self.evaluations = 0
        self.empty: set[int] = set()  # steps without responses

    async def sample(self, step: int, version: int, oldest: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        self.sampled.append((step, version, oldest))
        progress.needed, progress.kept, progress.answers = 4, 1, 9
        await (self.slow[step].wait() if step in self.slow else asyncio.sleep(0.01))
        if step in self.failures:
            raise self.failures[step]
        return make_batch([] if step in self.empty else [(3, [2, 4]), (2, [1, 5])], step)[:2]

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        self.evaluations += 1
        await (self.slow[0].wait() if 0 in self.slow else asyncio.sleep(0.01))
        return {"scores": [0.5, 1.0]}


class ScriptedServers:
    """Three servers, of which "c" joins; what is asked of them is written down."""

    def __init__(self) -> None:
        self.there = {id: Server(id, f"http://{id}", "server token") for id in "abc"}
        self.waiting = {"c"}
        self.calls: list[Any] = []
        self.held: asyncio.Event | None = None
        self.no_hope = False

    def healthy(self) -> list[Server]:
        return list(self.there.values())

    def joining(self) -> list[Server]:
        return [self.there[id] for id in sorted(self.waiting & self.there.keys())]

    def any_ready(self) -> bool:
        return not self.no_hope

    async def hold(self, mode: str) -> None:
        self.calls.append(("hold", mode))
        if self.held is not None and mode != "abort":
            await self.held.wait()

    def release(self, version: int, servers: Collection[Server]) -> None:
        self.calls.append(("release", version, "".join(server.id for server in servers)))
        self.waiting -= {server.id for server in servers}

    def admitted(self, server: Server, version: int) -> None:
        self.calls.append(("admitted", server.id, version))
        self.waiting.discard(server.id)

    def failed(self, id: str, reason: str) -> None:
        self.calls.append(("failed", id, reason))
        self.there.pop(id, None)


class RunningService:
    """A service on a loopback port, in an event loop on a thread. Nobody joins before a test says so."""

    def __init__(self, log_path: Path, config: Config) -> None:
        self.work, self.servers, self.config = ScriptedWork(), ScriptedServers(), config
        self.servers.waiting = set()
        self.records = Records(log_path.parent)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.address = Address(f"http://127.0.0.1:{self.call(self._start())}", TOKEN, log_path)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def _start(self) -> int:
        self.service = Service(TOKEN)
        self._runner = web.AppRunner(self.service.application(), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _ready(self) -> None:
        self.service.ready(self.config, self.work, self.servers, self.records)

    def ready(self, **rollout: str) -> None:
        self.config = self.config.model_copy(deep=True, update={"rollout": RolloutConfig(**rollout)})
        self.call(self._ready())

    def slow(self, step: int) -> None:
        """Let the batch of a step wait (0: evaluations)."""
        self.work.slow[step] = asyncio.Event()

    def go_on(self, step: int) -> None:
        """Complete it."""
        self.loop.call_soon_threadsafe(self.work.slow[step].set)

    def events(self) -> list[dict[str, Any]]:
        return list(read_records(self.records.path.parent))

    async def _fail(self, error: Exception) -> None:
        self.service.fail(error)

    def fail(self, error: Exception) -> None:
        self.call(self._fail(error))

    async def _stop(self) -> None:
        await self.service.close()
        await self._runner.cleanup()

    def stop(self) -> None:
        self.call(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    write_model(tmp_path / "model")
    running = RunningService(tmp_path / "controller.log", load_config(write_config(tmp_path)))
    yield running
    running.stop()


@pytest.fixture
def rollouts(running: RunningService) -> Iterator[RemoteRollouts]:
    with RemoteRollouts(running.address) as rollouts:
        yield rollouts


def quiet(done: float, total: float, text: str) -> None:
    pass


def nobody(admission: Admission) -> None:
    raise AssertionError(f"{admission} was not expected")


def written(calls: list[Any], size: int) -> list[Any]:
    """Wait until there are `size` calls."""
    deadline = time.monotonic() + 10
    while len(calls) < size and time.monotonic() < deadline:
        time.sleep(0.01)
    return calls


def test_a_batch_comes_through_with_any_share_of_its_tokens(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    rollouts.wait_ready(quiet)
    for step in (1, 2, 3):
        rollouts.begin(step, step - 1, step - 1)
        rollouts.begin(step, step - 1, step - 1)  # again does no harm
        header, tokens, _ = make_batch([(3, [2, 4]), (2, [1, 5])], step)
        received = rollouts.wait(step, quiet, nobody)
        assert_same(received, header)
        for share in ([], [3], [2, 0]):
            wanted = np.array(share, dtype=np.int32)
            assert_same(rollouts.tokens(step, wanted), select(header, tokens, wanted))
    assert running.work.sampled == [(1, 0, 0), (2, 1, 1), (3, 2, 2)]


def test_every_rank_may_wait_before_rank_zero_has_begun(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    received: list[BatchHeader | StopRun] = []
    with RemoteRollouts(running.address) as other:
        thread = threading.Thread(target=lambda: received.append(other.wait(1, quiet, nobody)))
        thread.start()
        time.sleep(0.1)
        rollouts.begin(1, 0, 0)
        thread.join(10)
    assert_same(received[0], rollouts.wait(1, quiet, nobody))


def test_progress_is_reported_while_a_batch_is_not_complete(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.slow(1)
    rollouts.begin(1, 0, 0)

    class SeenError(Exception):
        pass

    def show(done: float, total: float, text: str) -> None:
        assert (done, total) == (1, 4)
        assert "9 answers" in text
        raise SeenError

    with pytest.raises(SeenError):
        rollouts.wait(1, show, nobody)


def test_a_chosen_end_is_no_error(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.work.failures[1] = BudgetExhaustedError("budget used up")
    rollouts.begin(1, 0, 0)
    assert rollouts.wait(1, quiet, nobody) == StopRun("budget used up")
    assert rollouts.wait(1, quiet, nobody) == StopRun("budget used up")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (UserError("port 1 is in use"), UserError, "^port 1 is in use$"),
        (RuntimeError("server 0 ended"), ControllerError, r"server 0 ended.*controller\.log"),
        (KeyError("x"), ControllerError, r"KeyError\('x'\)"),
    ],
)
def test_a_failure_reaches_those_who_wait_at_once_and_those_who_come_later(
    running: RunningService, rollouts: RemoteRollouts, error: Exception, expected: type[Exception], message: str
) -> None:
    running.ready()
    running.slow(1)
    rollouts.begin(1, 0, 0)
    timer = threading.Timer(0.2, running.fail, [error])
    started = time.monotonic()
    timer.start()
    with pytest.raises(expected, match=message):
        rollouts.wait(1, quiet, nobody)
    assert time.monotonic() - started < 5
    timer.join()
    for ask in (
        lambda: rollouts.begin(2, 1, 1),
        lambda: rollouts.evaluate("x", quiet, nobody),
        lambda: rollouts.wait_ready(quiet),
    ):
        with pytest.raises(expected, match=message):
            ask()


def test_a_failing_batch_is_a_failure(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.work.failures[1] = ValueError("disk full")
    rollouts.begin(1, 0, 0)
    with pytest.raises(ControllerError, match="disk full"):
        rollouts.wait(1, quiet, nobody)


def test_evaluations_have_names(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    for name in ("before", "before", "after"):
        assert rollouts.evaluate(name, quiet, nobody) == {"scores": [0.5, 1.0]}
    assert running.work.evaluations == 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/batches/1", 400),  # already begun with another version
        ("POST", "/batches/3", 400),  # not the step after it
        ("POST", "/batches/7/tokens", 400),
        ("GET", "/batches/x", 404),
    ],
)
def test_wrong_requests_are_refused_and_harm_nothing(
    running: RunningService, rollouts: RemoteRollouts, method: str, path: str, status: int
) -> None:
    running.ready()
    running.slow(1)
    rollouts.begin(1, 0, 0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = httpx.request(method, running.address.url + path, headers=headers, json={"version": 5, "trained": 5})
    assert reply.status_code == status
    assert httpx.get(running.address.url + "/status", headers=headers).json()["state"] == "ready"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}])
@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("POST", "/batches/1")])
def test_nothing_is_open_without_the_token(
    running: RunningService, method: str, path: str, headers: dict[str, str]
) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    reply = httpx.request(method, running.address.url + path, headers=encoded)
    assert reply.status_code == 401


def test_a_controller_that_is_gone_is_noticed_at_once_with_its_log(running: RunningService) -> None:
    running.address.log_path.write_text("first\nlast words\n")
    running.call(running._runner.cleanup())
    with (
        RemoteRollouts(running.address) as rollouts,
        pytest.raises(ControllerError, match=r"(?s)cannot be reached.*last"),
    ):
        rollouts.wait(1, quiet, nobody)


def test_batches_of_several_steps_are_sampled_one_after_the_other(
    running: RunningService, rollouts: RemoteRollouts
) -> None:
    running.ready(pipeline="async", max_staleness=2)
    running.slow(1)
    for step in (1, 2, 3):
        rollouts.begin(step, 4, 3 + step)
    time.sleep(0.1)
    assert running.work.sampled == [(1, 4, 2)]
    running.go_on(1)
    for step in (1, 2, 3):
        header = rollouts.wait(step, quiet, nobody)
        assert isinstance(header, BatchHeader)
        assert header.step == step
    assert running.work.sampled == [(1, 4, 2), (2, 4, 3), (3, 4, 4)]


def test_tokens_of_the_batch_before_stay_until_every_rank_has_the_next(
    running: RunningService, rollouts: RemoteRollouts
) -> None:
    running.ready()
    everything = np.arange(2, dtype=np.int32)
    for step in (1, 2, 3):
        rollouts.begin(step, 0, 0)
        rollouts.wait(step, quiet, nobody)
    rollouts.tokens(2, everything)
    with pytest.raises(ControllerError, match="no complete batch of step 1"):
        rollouts.tokens(1, everything)


def test_steps_without_responses_stay_for_the_slowest_rank(running: RunningService, rollouts: RemoteRollouts) -> None:
    """Nothing is trained in them, so no rank waits there for the others."""
    running.work.empty = {2, 3}
    running.ready()
    for step in (1, 2, 3, 4):
        rollouts.begin(step, 0, 0)
        rollouts.wait(step, quiet, nobody)
    slow = [rollouts.wait(step, quiet, nobody) for step in (2, 3, 4)]
    assert [header.num_responses for header in slow if not isinstance(header, StopRun)] == [0, 0, 4]
    rollouts.tokens(1, np.arange(2, dtype=np.int32))  # may still be trained on
    rollouts.begin(5, 0, 0)
    rollouts.wait(5, quiet, nobody)
    with pytest.raises(ControllerError, match="no complete batch of step 3"):
        rollouts.tokens(3, np.arange(0, dtype=np.int32))


def test_after_a_chosen_end_no_later_step_is_sampled(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.work.failures[1] = BudgetExhaustedError("budget used up")
    for step in (1, 2):
        rollouts.begin(step, 0, 0)
    assert rollouts.wait(2, quiet, nobody) == StopRun("budget used up")
    assert [step for step, _, _ in running.work.sampled] == [1]


def test_a_batch_that_fails_ahead_of_time_ends_the_run_at_once(
    running: RunningService, rollouts: RemoteRollouts
) -> None:
    running.ready()
    running.work.failures[2] = RuntimeError("disk full")
    running.slow(3)
    for step in (1, 2):
        rollouts.begin(step, 0, 0)
    rollouts.wait(1, quiet, nobody)
    deadline = time.monotonic() + 10
    while running.service.status.state == "ready" and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody asks for step 2
    with pytest.raises(ControllerError, match="disk full"):
        rollouts.servers_for_push(0, 0)


@pytest.mark.parametrize("what", ["batch", "evaluation"])
def test_servers_that_join_while_ranks_wait_are_handed_to_all_of_them_in_the_same_order(
    running: RunningService, what: str
) -> None:
    running.ready()
    running.slow(1)
    running.slow(0)
    seen: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
    together = threading.Barrier(2, timeout=10)

    def rank(number: int) -> object:
        with RemoteRollouts(running.address) as rollouts:

            def admit(admission: Admission) -> None:
                seen[number].append((admission.number, "".join(server.id for server in admission.servers)))
                together.wait()  # as a collective would
                if number == 0 and admission.number == 0:
                    rollouts.admitted(0, 7, ["c"], {})
                    running.servers.waiting |= {"a", "b"}
                elif number == 0:
                    rollouts.admitted(1, 7, ["a"], {"b": "gone"})
                    running.go_on(1)
                    running.go_on(0)

            if what == "batch":
                if number == 0:
                    rollouts.begin(1, 0, 0)
                return rollouts.wait(1, quiet, admit)
            return rollouts.evaluate("now", quiet, admit)

    running.servers.waiting = {"c"}
    with ThreadPoolExecutor(2) as ranks:
        results = list(ranks.map(rank, range(2)))
    assert seen[0] == seen[1] == [(0, "c"), (1, "ab")]
    assert running.servers.calls == [("admitted", "c", 7), ("admitted", "a", 7), ("failed", "b", "gone")]
    assert all(results)
    with RemoteRollouts(running.address) as late:  # a rank that asks again gets the same
        running.servers.waiting = {"a"}
        again: list[int] = []
        if what == "batch":
            late.wait(1, quiet, lambda admission: again.append(admission.number))
        else:
            late.evaluate("now", quiet, lambda admission: again.append(admission.number))
        assert again == [0, 1]


def test_a_push_is_tried_with_the_servers_that_are_left(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.servers.waiting = {"c"}
    running.servers.held = asyncio.Event()
    with RemoteRollouts(running.address) as other, ThreadPoolExecutor(1) as ranks:
        early = ranks.submit(other.servers_for_push, 0, 0)  # before rank 0 has begun it
        time.sleep(0.1)
        for _ in range(2):
            rollouts.begin_push(0, 5)
        assert written(running.servers.calls, 1) == [("hold", "wait")]
        time.sleep(0.1)
        assert not early.done()  # nothing is sent before the fleet is held
        running.loop.call_soon_threadsafe(running.servers.held.set)
        assert rollouts.servers_for_push(0, 0) == early.result(10) == tuple(running.servers.healthy())
        second = ranks.submit(other.servers_for_push, 0, 1)
        for _ in range(2):
            rollouts.push_failed(0, 0, "a", "late")  # again does no harm
        del running.servers.there["b"]  # after the list of the attempt was made
        assert [server.id for server in rollouts.servers_for_push(0, 1)] == ["b", "c"]
        assert [server.id for server in second.result(10)] == ["b", "c"]
    for _ in range(2):
        rollouts.push_done(0, 1, 0.5)
    assert running.servers.calls == [("hold", "wait"), ("failed", "a", "late"), ("release", 5, "bc")]
    assert running.events()[0] == {"kind": "push", "version": 5, "servers": ["b", "c"], "seconds": 0.5}


def test_a_push_without_servers_waits_for_nobody(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.servers.there = {}
    rollouts.begin_push(0, 1)
    assert rollouts.servers_for_push(0, 0) == ()
    rollouts.push_done(0, 0, 0.0)
    assert running.servers.calls == [("hold", "wait"), ("release", 1, "")]


@pytest.mark.parametrize(("on_push", "mode"), [("keep", "keep"), ("abort", "abort")])
def test_answers_under_way_are_kept_or_ended_in_an_asynchronous_run(
    running: RunningService, rollouts: RemoteRollouts, on_push: str, mode: str
) -> None:
    running.config.fleet.on_push = on_push  # type: ignore[assignment]
    running.ready(pipeline="async")
    running.slow(1)
    rollouts.begin(1, 0, 0)
    rollouts.begin_push(0, 1)
    rollouts.servers_for_push(0, 0)  # though a batch is under way
    assert running.servers.calls == [("hold", mode)]


def test_one_step_off_pushes_when_the_batches_begun_are_complete(
    running: RunningService, rollouts: RemoteRollouts
) -> None:
    running.ready(pipeline="one_step_off")
    running.slow(1)
    rollouts.begin(1, 0, 0)
    rollouts.begin(2, 0, 1)
    rollouts.begin_push(0, 1)
    time.sleep(0.5)
    assert running.servers.calls == []
    running.go_on(1)
    rollouts.servers_for_push(0, 0)
    assert running.servers.calls == [("hold", "wait")]
    assert [step for step, _, _ in running.work.sampled] == [1, 2]


def test_answers_that_wait_for_a_server_do_not_hold_up_the_push_that_brings_one(
    running: RunningService, rollouts: RemoteRollouts
) -> None:
    running.ready(pipeline="one_step_off")
    running.slow(1)
    running.servers.held = asyncio.Event()  # never: nothing finishes
    rollouts.begin(1, 0, 0)
    rollouts.begin_push(0, 1)
    time.sleep(0.3)
    running.servers.no_hope = True
    rollouts.servers_for_push(0, 0)
    assert running.servers.calls == [("hold", "wait"), ("hold", "abort")]


def test_a_fleet_that_cannot_be_held_ends_the_run(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()

    async def fail(mode: str) -> None:
        raise RuntimeError("cannot be held")

    running.servers.hold = fail  # type: ignore[method-assign]
    rollouts.begin_push(0, 1)
    with pytest.raises(ControllerError, match="cannot be held"):
        rollouts.servers_for_push(0, 0)
