"""Routing, failover and pushes, on servers that follow a script."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.rollout.members import VersionError
from dapo_megatron.rollout.requests import RequestError
from dapo_megatron.types import Sample
from tests.scripted_world import RETRIES, SAMPLING, World
from tests.virtual_time import run_virtually

Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., World]:
    def play(scenario: Scenario, **options: Any) -> World:
        async def main() -> World:
            world = World(tmp_path, **options)
            await scenario(world)
            await world.settled()
            return world

        return run_virtually(main())

    return play


Play = Callable[..., World]


async def finish(world: World, tasks: list["asyncio.Task[Sample]"], prompt: int = 7) -> list[Sample]:
    samples = await asyncio.gather(*tasks)
    for sample in samples:
        world.check(sample, prompt)
    return samples


def test_group_stays_together_and_groups_spread(play: Play) -> None:
    async def scenario(world: World) -> None:
        for prompt in range(6):
            world.answers(world.group(prompt))
            await asyncio.sleep(0)
        homes = defaultdict(set)
        for server, task in world.engine.requests:
            homes[task.prompt.id].add(server)
        assert all(len(servers) == 1 for servers in homes.values())
        members = world.fleet.members()
        assert [member.answers for member in members] == [8, 8, 8]
        assert len({member.tokens for member in members}) == 1
        await asyncio.sleep(100)

    play(scenario, servers=3)


def test_group_leaves_its_server_when_that_is_a_groups_worth_behind(play: Play) -> None:
    async def scenario(world: World) -> None:
        busy = world.group(1, size=2)
        first = world.answers(busy)
        await asyncio.sleep(0)
        own = world.group(2, size=2)
        own.home = "s0"
        world.answers(own)
        await asyncio.sleep(0)
        assert [member.answers for member in world.fleet.members()] == [4, 0]  # one group's worth is borne
        late = world.group(3, size=2)
        late.home = "s0"
        world.answers(late)
        await asyncio.sleep(0)
        assert [member.answers for member in world.fleet.members()] == [4, 2]
        await finish(world, first, 1)
        await asyncio.sleep(100)

    play(scenario)


def test_tokens_that_arrived_are_not_expected_any_more(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group(size=2))
        await asyncio.sleep(0)
        expected = SAMPLING.max_tokens // 2
        assert sum(member.tokens for member in world.fleet.members()) == 2 * expected + 2  # the prompt once
        await asyncio.sleep(2)
        assert 0 < sum(member.tokens for member in world.fleet.members()) < 2 * expected + 2
        samples = await finish(world, tasks)
        mean = sum(len(sample.token_ids) for sample in samples) / 2
        tasks = world.answers(world.group(8, size=1))
        await asyncio.sleep(0)
        assert sum(member.tokens for member in world.fleet.members()) == int(mean) + 2
        await finish(world, tasks, 8)

    play(scenario)


def test_answer_of_a_dead_server_goes_on_elsewhere_from_what_had_arrived(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        await asyncio.sleep(4)
        world.server("s0").alive = False
        await finish(world, tasks)

    world = play(scenario)
    attempts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in world.attempts():
        attempts[record["index"]].append(record)
    cut = [records for records in attempts.values() if len(records) > 1]
    assert cut
    for first, second in cut:
        assert (first["server"], first["ended"]) == ("s0", "failed")
        assert (second["server"], second["ended"]) == ("s1", "finished")
        assert first["tokens_after"] == second["tokens_before"]
    assert any(second["tokens_before"] > 0 for _, second in cut)


def test_answer_of_a_server_that_is_removed_costs_no_retry(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        for _ in range(RETRIES + 3):
            await asyncio.sleep(0.2)
            for member in world.fleet.members():
                world.fleet.remove(member.id, "taken out by hand")
            world.start("s0")
        await finish(world, tasks)

    world = play(scenario, request_retries=0)
    assert {record["ended"] for record in world.attempts()} == {"finished", "removed"}


def test_answers_wait_while_no_server_is_ready(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        await asyncio.sleep(1000)
        assert not world.engine.requests
        joining = world.start("s0", ready=False)
        await asyncio.sleep(1000)
        assert not world.engine.requests
        assert [member.state for member in world.fleet.members()] == ["joining"]
        joining.version = 1
        world.fleet.add(joining.server, 1)
        assert [(member.state, member.version) for member in world.fleet.members()] == [("ready", 1)]
        await finish(world, tasks)

    play(scenario, servers=0)


def test_retries_are_bounded_and_servers_that_keep_failing_are_reported(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.server("s0").alive = world.server("s1").alive = False
        (task,) = world.answers(world.group(size=1))
        with pytest.raises(RequestError, match="lost"):
            await task

    world = play(scenario)
    assert world.engine.failures == {"p7-0": RETRIES + 1}
    assert [server for server, _ in world.engine.requests] == ["s0", "s1", "s0", "s1", "s0"]
    assert [id for id, _ in world.suspects] == ["s0"]
    assert "3 failures in a row" in world.suspects[0][1]


def test_suspect_rests_until_it_was_looked_at(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.server("s0").alive = False
        tasks = world.answers(world.group(size=6))
        await asyncio.sleep(0.5)
        assert world.suspects
        sent = len(world.engine.requests)
        await asyncio.sleep(1.0)
        assert len(world.engine.requests) == sent  # nobody knocks while it rests
        world.server("s0").alive = True
        await finish(world, tasks)

    play(scenario, servers=1)


def test_refused_answer_is_not_tried_again(play: Play) -> None:
    async def scenario(world: World) -> None:
        async def refuse(*_: Any) -> Sample:
            raise RequestError("too long", kind="refused")

        world.engine.answer = refuse  # type: ignore[method-assign]
        (task,) = world.answers(world.group(size=1))
        with pytest.raises(RequestError, match="too long"):
            await task
        assert not world.suspects

    assert len(play(scenario).attempts()) == 1


def test_silent_server_is_reported_once_per_timeout(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        await asyncio.sleep(1)
        world.server("s0").frozen = True
        await asyncio.sleep(18)
        assert not world.suspects
        await asyncio.sleep(14)
        ((id, reason),) = world.suspects
        assert id == "s0"
        assert "no token of its 4 answers" in reason
        world.fleet.remove("s0", reason)
        await finish(world, tasks)

    world = play(scenario)
    assert any(record["ended"] == "removed" and record["tokens_after"] for record in world.attempts())


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_nothing_is_sampled_while_the_fleet_is_held(play: Play, mode: str) -> None:
    async def scenario(world: World) -> None:
        tasks = [task for prompt in range(3) for task in world.answers(world.group(prompt))]
        await asyncio.sleep(2)
        await world.fleet.hold(mode)  # type: ignore[arg-type]
        before = [member.answers for member in world.fleet.members()]
        assert (sum(before) > 0) == (mode == "keep")
        late = world.answers(world.group(9))
        await asyncio.sleep(50)
        assert [member.answers for member in world.fleet.members()] == before
        assert not world.suspects  # paused is not silent
        for server in world.engine.servers.values():
            server.version = 2
        world.fleet.release(2, {"s0", "s1"})
        await finish(world, late, 9)
        versions = [set(sample.versions.tolist()) for sample in await asyncio.gather(*tasks)]
        assert ({1, 2} in versions) == (mode != "wait")
        for server in world.engine.servers.values():
            assert server.moving.is_set()

    play(scenario)


def test_server_that_had_nothing_to_do_was_not_silent(play: Play) -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(100)
        world.server("s0").frozen = True
        tasks = world.answers(world.group())
        await asyncio.sleep(12)
        assert not world.suspects
        world.server("s0").frozen = False
        await finish(world, tasks)

    play(scenario)


def test_slow_server_is_not_silent(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.engine.pace = 6.0
        await finish(world, world.answers(world.group()))
        assert asyncio.get_running_loop().time() > 30
        assert not world.suspects

    play(scenario, servers=1)


def test_answer_longer_than_expected_still_counts(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group(size=3))
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.1)
            for member in world.fleet.members():
                assert member.tokens >= member.answers
        samples = await finish(world, tasks)
        assert max(len(sample.token_ids) for sample in samples) > SAMPLING.max_tokens // 2

    play(scenario, servers=1)


def test_success_forgives_failures(play: Play) -> None:
    async def scenario(world: World) -> None:
        for _ in range(4):
            world.engine.failing = 1.0
            (task,) = world.answers(world.group(size=1))
            await asyncio.sleep(1.05)
            world.engine.failing = 0.0
            await finish(world, [task])
        assert sum(world.engine.failures.values()) >= 3
        assert not world.suspects

    play(scenario, servers=1)


def test_server_that_missed_a_push_gets_no_answers(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        await asyncio.sleep(1)
        await world.fleet.hold("keep")
        world.server("s1").version = 2
        world.fleet.release(2, ["s1"])
        assert [(member.state, member.version) for member in world.fleet.members()] == [("joining", None), ("ready", 2)]
        await finish(world, tasks)
        assert world.engine.requests[-1][0] == "s1"

    play(scenario)


def test_server_that_cannot_be_paused_loses_its_answers(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        await asyncio.sleep(1)
        world.server("s0").frozen = True
        await world.fleet.hold("keep")
        assert [member.answers for member in world.fleet.members()] == [0, 0]
        assert "could not be paused" in world.suspects[0][1]
        world.fleet.remove("s0", "hangs")
        world.fleet.release(1, ["s1"])
        await finish(world, tasks)

    play(scenario)


@pytest.mark.parametrize("ending", ["finished", "aborted"])
def test_version_that_cannot_be_ends_the_run(play: Play, ending: str) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group(size=1))
        await asyncio.sleep(0.5)
        world.server("s0").version = 5  # without a push
        if ending == "aborted":
            await asyncio.sleep(3)
            await world.fleet.hold("abort")
        with pytest.raises(VersionError, match=r"server s0 \(http://s0:1\).*weights .*5.*had weights 1"):
            await tasks[0]

    play(scenario)


def test_versions_that_fall_cannot_be(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group(prompt=3, size=2))
        await asyncio.sleep(1)
        await world.push("keep")
        world.server("s0").version = 2
        await asyncio.sleep(1)
        world.server("s0").version = 1
        with pytest.raises(VersionError, match=r"weights .*2, 1.*had weights 1, 2"):
            await asyncio.gather(*tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    play(scenario)


@pytest.mark.parametrize("late", [True, False])
def test_other_weights_of_a_server_that_left_are_nobodys_concern(play: Play, late: bool) -> None:
    """Whether its last answers end, or are ended: they go on from the tokens of before."""

    async def scenario(world: World) -> None:
        if late:
            world.engine.abort = lambda server, ids: asyncio.sleep(0)  # type: ignore[method-assign, assignment, return-value]
        (task,) = world.answers(world.group(size=1))
        await asyncio.sleep(0.2)
        world.server("s0").version = 9
        await asyncio.sleep(1)
        world.fleet.remove("s0", "a push failed there")
        assert (await finish(world, [task]))[0].versions.max() == 1

    assert [record["ended"] for record in play(scenario).attempts()] == ["removed", "finished"]


def test_cancelled_answer_leaves_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = world.answers(world.group())
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.fleet.hold("wait")

    assert {record["ended"] for record in play(scenario).attempts()} == {"aborted"}
