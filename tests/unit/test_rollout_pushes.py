"""Pushes and servers that join, through the trainer's handle of the controller."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts
from dapo_megatron.rollout.jobs import Admission
from tests.running_service import RunningService, quiet


def written(calls: list[Any], size: int) -> list[Any]:
    """Wait until there are `size` calls."""
    deadline = time.monotonic() + 10
    while len(calls) < size and time.monotonic() < deadline:
        time.sleep(0.01)
    return calls


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
