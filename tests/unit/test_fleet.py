"""Routing, failover, pushes and their races, on servers that follow a script."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.fleet import Answer, AnswerGroup, Fleet
from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.members import VersionError
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Generated, RequestError, Sampling
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest
from dapo_megatron.types import Prompt, Sample
from tests.scripted_engine import STOP, ScriptedEngine, ScriptedServer, script
from tests.virtual_time import run_virtually

SAMPLING = Sampling(max_tokens=30, stop_token_ids=(STOP,))
RETRIES = 4


class World:
    """A fleet of scripted servers, and what happens to it."""

    def __init__(self, folder: Path, seed: int = 0, servers: int = 2, failing: float = 0.0, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.engine = ScriptedEngine(self.rng, failing)
        self.folder = folder
        self.version = 1
        self.suspects: list[tuple[str, str]] = []
        settings = {"request_retries": RETRIES, "stall_timeout": 20.0, "health_every": 2.0} | config
        self.fleet = Fleet(
            self.engine, FleetConfig.model_validate(settings), Records(folder), self.engine.connect, pause=0.1
        )
        self.fleet.on_suspect = self._suspect
        self.urls = 0
        for number in range(servers):
            self.start(f"s{number}")

    def _suspect(self, id: str, reason: str) -> None:
        self.suspects.append((id, reason))

    def start(self, id: str, ready: bool = True) -> ScriptedServer:
        self.urls += 1
        server = self.engine.start(id, f"http://{id}:{self.urls}")
        server.version = self.version if ready else None
        self.fleet.add(server.server, server.version)
        return server

    def server(self, id: str) -> ScriptedServer:
        """The newest of this name."""
        return [server for server in self.engine.servers.values() if server.server.id == id][-1]

    def group(self, prompt: int = 7, size: int = 4, draw: int = 0) -> AnswerGroup:
        return AnswerGroup(draw, Prompt(prompt, (prompt, 1), ""), size, SAMPLING)

    def answers(self, group: AnswerGroup) -> list["asyncio.Task[Sample]"]:
        return [
            asyncio.create_task(self.fleet.answer(Answer(group, index, f"p{group.prompt.id}-{index}")))
            for index in range(group.size)
        ]

    async def push(self, mode: Any, lost: str | None = None) -> None:
        await self.fleet.hold(mode)
        await asyncio.sleep(self.rng.random() * 3)
        if lost is not None:
            self.fleet.remove(lost, "it was late in a push")
        self.version += 1
        ids = {member.id for member in self.fleet.members()}
        for id in ids:
            self.server(id).version = self.version
        self.fleet.release(self.version, ids)

    def check(self, sample: Sample, prompt: int = 7) -> None:
        """It is exactly what the script says, and no token is said to be newer than it is."""
        ids, versions = sample.token_ids.tolist(), sample.versions.tolist()
        assert ids == script(prompt, ids[0])
        true = -sample.log_probs
        assert (sample.versions <= true).all()
        assert versions == sorted(versions)
        assert sample.versions.min() >= 1

    async def settled(self) -> None:
        """Nothing is left running or counted."""
        await self.fleet.close()
        for member in self.fleet.members():
            assert (member.answers, member.tokens, member.oldest, member.quiet) == (0, 0, None, None)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def attempts(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.folder) if record["kind"] == "attempt"]


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


def test_end_leaves_no_server_paused(play: Play) -> None:
    async def scenario(world: World) -> None:
        tasks = [task for prompt in range(2) for task in world.answers(world.group(prompt))]
        await asyncio.sleep(2)
        await world.fleet.hold("keep")
        world.fleet.remove("s1", "late in a push")
        world.server("s1").frozen = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.fleet.close()
        assert [server.moving.is_set() for server in world.engine.servers.values()] == [True, False]

    play(scenario)


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


@pytest.mark.parametrize("block", range(8))
def test_nothing_is_lost_or_doubled_whatever_happens_when(tmp_path: Path, block: int) -> None:
    """Failures, deaths, hangs, restarts, pushes and cancelled groups in random order; 25 schedules in each block."""
    for seed in range(block * 25, block * 25 + 25):
        run_virtually(_chaos(tmp_path / str(seed), seed))


async def _chaos(folder: Path, seed: int) -> None:
    world = World(folder, seed, servers=3, failing=0.01)
    stop = asyncio.Event()
    events = asyncio.create_task(_events(world, stop))
    generate = GroupGenerator(world.fleet, SAMPLING, watchdog_after=1e6, resume=True)
    groups = await asyncio.gather(*(_group(world, generate, prompt) for prompt in range(8)))
    stop.set()
    await events
    firsts = [sample.token_ids[0] for group in groups for sample in group]
    assert len(firsts) == len(set(firsts)), "an answer was counted twice"
    assert max(world.engine.failures.values(), default=0) <= RETRIES + 1
    await world.settled()
    finished: dict[tuple[int, str], int] = defaultdict(int)
    for record in world.attempts():
        finished[record["draw"], record["request"].rpartition("-")[0]] += record["ended"] == "finished"
    assert max(finished.values()) == 1


async def _group(world: World, generate: GroupGenerator, prompt: int) -> list[Sample]:
    """A group, cancelled and taken up again a few times on its way."""
    await asyncio.sleep(world.rng.random() * 10)
    finished: dict[int, Sample] = {}
    partial: dict[int, Generated] = {}
    while True:
        given, parts = dict(finished), dict(partial)
        partial.clear()
        request = GroupRequest(
            prompt, Prompt(prompt, (prompt, 1), ""), 4, finished.__setitem__, partial.__setitem__, given, parts
        )
        task = asyncio.ensure_future(generate(request))
        if world.rng.random() < 0.4:
            await asyncio.wait([task], timeout=world.rng.random() * 10)
            task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert given.items() <= finished.items()
            left = partial | finished
            assert len(left) == len(partial) + len(finished)
            # Nothing that had arrived may be missing.
            assert all(len(part.token_ids) <= len(left[place].token_ids) for place, part in parts.items())
        elif isinstance(task.exception(), GroupFailedError):
            finished, partial = {}, {}  # the sampler would drop it
        else:
            samples = task.result()
            assert samples == tuple(finished[place] for place in range(4))
            for sample in samples:
                world.check(sample, prompt)
            return list(samples)


async def _events(world: World, stop: asyncio.Event) -> None:
    rng = world.rng
    while not stop.is_set():
        await asyncio.sleep(rng.random() * 4)
        id = f"s{rng.randrange(3)}"
        what = rng.choice(["push", "push", "lost push", "die", "hang", "slip away"])
        present = id in {member.id for member in world.fleet.members()}
        if what == "push" or not present:
            await world.push(rng.choice(["wait", "keep", "abort"]))
        elif what == "lost push":
            await world.push(rng.choice(["wait", "keep", "abort"]), lost=id)
            await _restart(world, id)
        elif what == "die":
            world.server(id).alive = False
            await asyncio.sleep(rng.random())
            world.fleet.remove(id, "its process ended")
            await _restart(world, id)
        elif what == "hang":
            world.server(id).frozen = True
            await asyncio.sleep(rng.random() * 3)
            world.fleet.remove(id, "it hangs")
            world.server(id).frozen = rng.random() < 0.5
            await _restart(world, id)
        else:
            world.fleet.remove(id, "its line is gone from the file")
            await _restart(world, id)


async def _restart(world: World, id: str) -> None:
    await asyncio.sleep(world.rng.random() * 5)
    server = world.start(id, ready=False)
    await asyncio.sleep(world.rng.random())
    server.version = world.version
    world.fleet.add(server.server, world.version)
