"""Batches and evaluations of the controller, through the trainer's handle."""

import threading
import time

import httpx
import numpy as np
import pytest

from dapo_megatron.errors import UserError
from dapo_megatron.rollout.blocks import select
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, StopRun
from dapo_megatron.rollout.jobs import BudgetExhaustedError
from dapo_megatron.types import BatchHeader
from tests.running_service import TOKEN, RunningService, nobody, quiet
from tests.unit.test_blocks import assert_same, make_batch


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
