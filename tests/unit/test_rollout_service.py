"""The controller's HTTP interface, through the trainer's handle, with batches made up here instead of by servers."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web

from dapo_megatron.errors import UserError
from dapo_megatron.rollout.address import Address
from dapo_megatron.rollout.blocks import BatchTokens, select
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, StopRun
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.service import BudgetExhaustedError, Service
from dapo_megatron.types import BatchHeader
from tests.unit.test_blocks import assert_same, make_batch

TOKEN = "secret"


class ScriptedWork:
    """Batches of `make_batch`; an exception given for a step is raised; the batch of a step in `slow` never comes."""

    def __init__(self) -> None:
        self.failures: dict[int, Exception] = {}
        self.slow: set[int] = set()
        self.sampled: list[tuple[int, int]] = []
        self.evaluations = 0

    async def sample(self, step: int, version: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        self.sampled.append((step, version))
        progress.needed, progress.kept, progress.answers = 4, 1, 9
        await asyncio.sleep(3600 if step in self.slow else 0.01)
        if step in self.failures:
            raise self.failures[step]
        return make_batch([(3, [2, 4]), (2, [1, 5])], step)[:2]

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        self.evaluations += 1
        await asyncio.sleep(0.01)
        return {"scores": [0.5, 1.0]}


class RunningService:
    """A service on a loopback port, in an event loop on a thread."""

    def __init__(self, log_path: Path) -> None:
        self.work = ScriptedWork()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.address = Address(f"http://127.0.0.1:{self.call(self._start())}", TOKEN, log_path)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _start(self) -> int:
        self.service = Service(TOKEN)
        self._runner = web.AppRunner(self.service.application(), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _ready(self) -> None:
        self.service.ready(self.work, [("http://server", "server token")])

    def ready(self) -> None:
        self.call(self._ready())

    async def _fail(self, error: Exception) -> None:
        self.service.fail(error)

    def fail(self, error: Exception) -> None:
        self.call(self._fail(error))

    async def _stop(self) -> None:
        await self.service.close()
        await self._runner.cleanup()

    def stop(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    running = RunningService(tmp_path / "controller.log")
    yield running
    running.stop()


@pytest.fixture
def rollouts(running: RunningService) -> Iterator[RemoteRollouts]:
    with RemoteRollouts(running.address) as rollouts:
        yield rollouts


def quiet(done: float, total: float, text: str) -> None:
    pass


def test_a_batch_comes_through_with_any_share_of_its_tokens(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    assert rollouts.wait_ready(quiet) == [("http://server", "server token")]
    for step in (1, 2, 3):
        rollouts.begin(step, version=step - 1)
        rollouts.begin(step, version=step - 1)  # again does no harm
        header, tokens, _ = make_batch([(3, [2, 4]), (2, [1, 5])], step)
        received = rollouts.wait(step, quiet)
        assert_same(received, header)
        for share in ([], [3], [2, 0]):
            wanted = np.array(share, dtype=np.int32)
            assert_same(rollouts.tokens(step, wanted), select(header, tokens, wanted))
    assert running.work.sampled == [(1, 0), (2, 1), (3, 2)]


def test_every_rank_may_wait_before_rank_zero_has_begun(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    received: list[BatchHeader | StopRun] = []
    with RemoteRollouts(running.address) as other:
        thread = threading.Thread(target=lambda: received.append(other.wait(1, quiet)))
        thread.start()
        time.sleep(0.1)
        rollouts.begin(1, version=0)
        thread.join(10)
    assert_same(received[0], rollouts.wait(1, quiet))


def test_progress_is_reported_while_a_batch_is_not_complete(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.work.slow.add(1)
    rollouts.begin(1, version=0)

    class SeenError(Exception):
        pass

    def show(done: float, total: float, text: str) -> None:
        assert (done, total) == (1, 4)
        assert "9 answers" in text
        raise SeenError

    with pytest.raises(SeenError):
        rollouts.wait(1, show)


def test_a_chosen_end_is_no_error(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.work.failures[1] = BudgetExhaustedError("budget used up")
    rollouts.begin(1, version=0)
    assert rollouts.wait(1, quiet) == StopRun("budget used up")
    assert rollouts.wait(1, quiet) == StopRun("budget used up")


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
    running.work.slow.add(1)
    rollouts.begin(1, version=0)
    timer = threading.Timer(0.2, running.fail, [error])
    started = time.monotonic()
    timer.start()
    with pytest.raises(expected, match=message):
        rollouts.wait(1, quiet)
    assert time.monotonic() - started < 5
    timer.join()
    for ask in (
        lambda: rollouts.begin(2, 1),
        lambda: rollouts.evaluate("x", quiet),
        lambda: rollouts.wait_ready(quiet),
    ):
        with pytest.raises(expected, match=message):
            ask()


def test_a_failing_batch_is_a_failure(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    running.work.failures[1] = ValueError("disk full")
    rollouts.begin(1, version=0)
    with pytest.raises(ControllerError, match="disk full"):
        rollouts.wait(1, quiet)


def test_evaluations_have_names(running: RunningService, rollouts: RemoteRollouts) -> None:
    running.ready()
    for name in ("before", "before", "after"):
        assert rollouts.evaluate(name, quiet) == {"scores": [0.5, 1.0]}
    assert running.work.evaluations == 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/batches/1", 400),  # already begun with another version
        ("POST", "/batches/2", 400),  # the one before is not complete
        ("POST", "/batches/7/tokens", 400),
        ("GET", "/batches/x", 404),
    ],
)
def test_wrong_requests_are_refused_and_harm_nothing(
    running: RunningService, rollouts: RemoteRollouts, method: str, path: str, status: int
) -> None:
    running.ready()
    running.work.slow.add(1)
    rollouts.begin(1, version=0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = httpx.request(method, running.address.url + path, headers=headers, json={"version": 5})
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


def test_a_controller_that_is_gone_is_noticed_at_once_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    log.write_text("first\nlast words\n")
    running = RunningService(log)
    running.stop()
    with (
        RemoteRollouts(running.address) as rollouts,
        pytest.raises(ControllerError, match=r"(?s)cannot be reached.*last"),
    ):
        rollouts.wait(1, quiet)
