"""How long a lost server is waited for, and which of its lives is meant."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout import lives, supervisor
from dapo_megatron.rollout.lives import LONGEST_PAUSE, ManagedLife
from dapo_megatron.rollout.requests import RequestError
from dapo_megatron.rollout.server import Server as Process
from tests.unit.test_supervisor import Bench, MakeBench, bench, make_config

__all__ = ["bench", "make_config"]  # fixtures


class Living:
    """A process that goes on."""

    def poll(self) -> int | None:
        return None


class FoundHealthy(ManagedLife):
    """Its server answers again."""

    async def _lives(self, url: str) -> bool:
        return True


def life() -> tuple[ManagedLife, Process]:
    process = Process(0, Living(), "127.0.0.1", 1, Path("log"))  # type: ignore[arg-type]
    made = FoundHealthy(0, lambda _: process, "token", FleetConfig(), None)  # type: ignore[arg-type]
    made._process = process
    return made, process


@pytest.mark.parametrize(
    ("losses", "seconds"), [(0, 1), (1, 1), (2, 2), (3, 4), (9, 256), (11, LONGEST_PAUSE), (5000, LONGEST_PAUSE)]
)
def test_a_pause_doubles_with_each_loss_up_to_the_longest(losses: int, seconds: float) -> None:
    made, _ = life()
    made._lost = losses
    assert made._pause() == seconds


@pytest.mark.parametrize("silent", [True, False])
async def test_only_a_server_that_was_silent_is_taken_back_as_it_is(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers and failed all the same is started again."""
    monkeypatch.setattr(lives, "PAUSE_SECONDS", 0.0)
    made, process = life()
    made._silent = silent
    assert await made._recovers(process, "it has not answered") == silent


@pytest.fixture
async def looked_at(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Bench, asyncio.Event]]:
    """A server whose look fails when the event is set."""
    failing = asyncio.Event()

    class Look:
        def __init__(self, *_: Any) -> None:
            pass

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: Any) -> None:
            pass

        async def generate(self, *_: Any) -> None:
            await failing.wait()
            raise RequestError("it does not generate")

    monkeypatch.setattr(supervisor, "ServerClient", Look)
    b = bench(servers=1)
    async with b.running():
        await b.push(1)
        yield b, failing


@pytest.mark.parametrize("returned", [True, False])
async def test_a_look_at_a_server_says_nothing_of_its_next_life(
    looked_at: tuple[Bench, asyncio.Event], returned: bool
) -> None:
    b, failing = looked_at
    (only,) = b.supervisor._lives.values()
    b.supervisor.suspect("server_0", "no token for a while")
    await asyncio.sleep(0)
    assert only.server is not None
    if returned:
        only.server = replace(only.server, life=only.server.life + 1)
    failing.set()
    await b.until(lambda: not b.supervisor._looks, "look")
    assert ("removed" in b.history("server_0")) != returned
