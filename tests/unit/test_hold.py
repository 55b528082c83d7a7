"""Pushes that find answers paused (`fleet.on_push: keep`), on servers that follow a script."""

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from dapo_megatron.rollout.pushes import HoldMode, Pushes
from dapo_megatron.rollout.requests import Server
from tests.scripted_world import World
from tests.virtual_time import run_virtually

URLS = ["http://elsewhere:1"]


class Servers:
    """What a push needs, of a World's fleet. `mode` is that of the last hold."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.hold = world.fleet.hold

    def healthy(self) -> list[Server]:
        return [self._world.server(member.id).server for member in self._world.fleet.members()]

    def joining(self) -> list[Server]:
        return []

    def any_ready(self) -> bool:
        return True

    def release(self, version: int, servers: Collection[Server]) -> None:
        self._world.fleet.release(version, {server.id for server in servers})

    def admitted(self, server: Server, version: int) -> None:
        raise AssertionError("nobody joins")

    def failed(self, id: str, reason: str) -> None:
        self._world.fleet.remove(id, reason)


async def nothing() -> None: ...


def pushes_of(world: World, mode: HoldMode = "keep") -> Pushes:
    def fail(error: BaseException) -> None:
        raise error

    return Pushes(Servers(world), mode, nothing, fail)


def keeping(folder: Path) -> World:
    return World(folder, on_push="keep", mode="external", urls=URLS)


def test_paused_answers_go_on_with_the_pushed_weights_where_they_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = keeping(tmp_path)
        pushes = pushes_of(world)
        tasks = [task for prompt in range(2) for task in world.answers(world.group(prompt))]
        await asyncio.sleep(2)
        pushes.begin(0, 2)
        first = await pushes.servers(0, 0, 30)
        assert first is not None
        assert [server.id for server in first] == ["s0", "s1"]
        s0, s1 = world.server("s0"), world.server("s1")
        assert not s0.moving.is_set()
        assert not s1.moving.is_set()
        under_way = [member.answers for member in world.fleet.members()]
        assert min(under_way) > 0  # they wait there
        pushes.failed(0, 0, "s0", "late in a push")
        second = await pushes.servers(0, 1, 30)
        assert second is not None
        assert [server.id for server in second] == ["s1"]
        await asyncio.sleep(30)
        assert not s1.moving.is_set()
        s1.version = 2
        assert pushes.done(0, 1) == (2, second)
        samples = await asyncio.gather(*tasks)
        for index, sample in enumerate(samples):
            world.check(sample, index // 4)
        assert {1, 2} in [set(sample.versions.tolist()) for sample in samples]  # one that was kept
        assert s1.moving.is_set()
        assert not s0.moving.is_set()  # it has a part of the weights
        await world.settled()
        assert not s0.moving.is_set()

    run_virtually(scenario())


@pytest.mark.parametrize("mode", ["managed", "external"])
def test_servers_in_the_middle_of_a_push_stay_paused_when_the_run_ends(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        world = World(tmp_path, on_push="keep", mode=mode, urls=URLS if mode == "external" else [])
        tasks = [task for prompt in range(2) for task in world.answers(world.group(prompt))]
        await asyncio.sleep(2)
        await world.fleet.hold("keep")
        world.fleet.remove("s1", "late in a push")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.settled()
        assert [server.moving.is_set() for server in world.engine.servers.values()] == [False, False]

    with caplog.at_level(logging.WARNING):
        run_virtually(scenario())
    told = "servers http://s0:1, http://s1:2 stay paused: the run ended before a push did" in caplog.text
    assert told == (mode == "external")  # the others end with the run


def test_servers_that_have_the_weights_go_on_though_the_run_ends_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = keeping(tmp_path)
        tasks = [task for prompt in range(2) for task in world.answers(world.group(prompt))]
        await asyncio.sleep(2)
        await world.fleet.hold("keep")
        world.server("s1").version = 2
        world.fleet.release(2, ["s1"])
        for task in tasks:
            task.cancel()
        await world.fleet.close()  # before anything that `release` began has run
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [server.moving.is_set() for server in world.engine.servers.values()] == [False, True]

    run_virtually(scenario())


def _admitted(world: World, server: Server) -> None:
    world.fleet.add(server, 1)


def _pushed(world: World, server: Server) -> None:
    world.fleet.release(1, ["s0", "s1", server.id])


@pytest.mark.parametrize("bring", [_admitted, _pushed])
def test_a_server_that_another_run_left_paused_goes_on_with_its_first_weights(
    tmp_path: Path, bring: Callable[[World, Server], None]
) -> None:
    async def scenario() -> None:
        world = keeping(tmp_path)
        late = world.start("s2", ready=False)
        late.moving.clear()
        if bring is _pushed:
            await world.fleet.hold("keep")
        late.version = 1
        bring(world, late.server)
        await asyncio.sleep(1)
        assert late.moving.is_set()
        tasks = [task for prompt in range(3) for task in world.answers(world.group(prompt))]
        for index, sample in enumerate(await asyncio.gather(*tasks)):
            world.check(sample, index // 4)
        assert "s2" in {server for server, _ in world.engine.requests}
        await world.settled()

    run_virtually(scenario())
