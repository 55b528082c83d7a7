"""Nothing is lost or doubled whatever happens to a fleet and when: random schedules on servers that follow a script."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.requests import Generated
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest
from dapo_megatron.types import Prompt, Sample
from tests.scripted_world import RETRIES, SAMPLING, World
from tests.virtual_time import run_virtually


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
