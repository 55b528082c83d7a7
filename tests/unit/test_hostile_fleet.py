"""Servers that fail in every way they can, under the real client and fleet, beside one that does its part."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout import engine
from dapo_megatron.rollout.engine import LocalEngine
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.members import VersionError
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Generated, Sampling
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest
from dapo_megatron.types import Prompt, Sample
from tests.fake_server import VOCABULARY, FakeServer, Fault, continuation, log_prob

PROMPT = Prompt(0, (5, 6, 7), "")
TOKENS = 10
SIZE = 4


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ABORT_GRACE", 0.2)


class Ungraded:
    """Takes every answer for right."""

    def sample(self, answer: Generated, prompt: Prompt, by_rule: bool = False) -> Sample:
        return Sample(answer.token_ids, answer.log_probs, answer.finish_reason, answer.versions, True, 1.0, 1.0)


@asynccontextmanager
async def two_servers(fault: Fault, folder: Path, **config: Any) -> AsyncIterator[tuple[FakeServer, FakeServer, Fleet]]:
    """A server with a fault, one without, and their fleet."""
    async with (
        FakeServer("bad", [fault], stubborn=True, answers_aborts=fault != "hangs") as bad,
        FakeServer("good") as good,
        fleet_of(folder, bad, good, **config) as fleet,
    ):
        yield bad, good, fleet


@asynccontextmanager
async def fleet_of(folder: Path, *servers: FakeServer, **config: Any) -> AsyncIterator[Fleet]:
    """A fleet that takes out what it suspects, as the supervisor does."""
    settings = FleetConfig(**{"request_retries": 3, "stall_timeout": 0.4, "health_every": 0.2} | config)
    async with LocalEngine(Ungraded(), 60, VOCABULARY) as local:  # type: ignore[arg-type]
        fleet = Fleet(local, settings, Records(folder), pause=0.01)
        fleet.on_suspect = fleet.remove
        for server in servers:
            fleet.add(server.server, 3)
        yield fleet
        await fleet.close()


async def answer(
    fleet: Fleet, on_answer: Callable[[int, Sample], None] = lambda place, sample: None
) -> tuple[Sample, ...]:
    generate = GroupGenerator(fleet, Sampling(TOKENS), watchdog_after=60)
    return await generate(GroupRequest(0, PROMPT, SIZE, on_answer, lambda place, part: None))


def check(samples: tuple[Sample, ...]) -> None:
    expected = continuation(PROMPT.token_ids, TOKENS)
    for sample in samples:
        assert sample.token_ids.tolist() == expected
        assert sample.log_probs == pytest.approx([log_prob(token) for token in expected])
        assert sample.versions.tolist() == [3] * TOKENS
    assert len(samples) == SIZE


SURVIVED: list[Fault] = [
    *("500", "garbage", "truncated", "closes", "hangs", "few_log_probs", "nan_log_probs", "null_log_probs"),
    *("too_many_tokens", "wrong_ids", "strange_version", "empty_choices", "no_ending", "huge", "drip", "error_chunk"),
    "aborts",
]


@pytest.mark.parametrize("fault", SURVIVED)
async def test_answers_of_a_server_that_fails_go_on_at_one_that_does_not(
    fault: Fault, tmp_path: Path, short_grace: None
) -> None:
    async with two_servers(fault, tmp_path) as (bad, good, fleet):
        seen: dict[int, Sample] = {}
        samples = await answer(fleet, seen.__setitem__)
        check(samples)
        assert seen == dict(enumerate(samples))
        assert sum(member.answers for member in fleet.members()) == 0
        if fault != "drip":  # which is slow, but right
            assert [member.id for member in fleet.members()] == ["good"]
    assert len(bad.bodies) == SIZE
    assert len(good.bodies) == (0 if fault == "drip" else SIZE)
    attempts = [record for record in read_records(tmp_path) if record["kind"] == "attempt"]
    assert sum(record["ended"] == "finished" for record in attempts) == SIZE
    kept = {record["tokens_before"] for record in attempts if record["server"] == "good"}
    assert kept == {"drip": set(), "500": {0}, "strange_version": {8}}.get(fault, {4})  # what had arrived


@pytest.mark.parametrize("fault", ["500", "garbage", "closes", "too_many_tokens", "null_log_probs"])
async def test_fleet_without_a_sound_server_gives_one_clear_error(fault: Fault, tmp_path: Path) -> None:
    async with FakeServer("bad", [fault], stubborn=True) as bad, fleet_of(tmp_path, bad) as fleet:
        fleet.on_suspect = lambda id, reason: None  # nobody takes it out
        with pytest.raises(GroupFailedError, match=f"server {bad.url}: "):
            await asyncio.wait_for(answer(fleet), 60)
        assert sum(member.answers + member.tokens for member in fleet.members()) == 0


async def test_answer_of_weights_that_the_server_cannot_have_ends_the_run(tmp_path: Path) -> None:
    async with two_servers("wrong_version", tmp_path) as (bad, _, fleet):
        with pytest.raises(VersionError, match=rf"server bad \({bad.url}\) says .* weights 99, .* had weights 3"):
            await answer(fleet)
        assert sum(member.answers + member.tokens for member in fleet.members()) == 0


async def test_server_that_does_not_answer_an_abort_does_not_hold_a_push_up(tmp_path: Path, short_grace: None) -> None:
    async with two_servers("hangs", tmp_path, stall_timeout=60) as (bad, _, fleet):
        running = asyncio.create_task(answer(fleet))
        while len(bad.bodies) < SIZE:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(fleet.hold("abort"), 60)
        fleet.remove("bad", "it hangs")
        fleet.release(3, ["good"])
        check(await running)


async def test_push_pauses_and_resumes_what_runs(tmp_path: Path) -> None:
    busy, idle = FakeServer("busy", delay=0.05), FakeServer("idle")
    async with busy, idle, fleet_of(tmp_path, busy, idle) as fleet:
        running = asyncio.create_task(answer(fleet))
        while not busy.bodies:
            await asyncio.sleep(0.01)
        await fleet.hold("keep")
        fleet.release(3, ["busy", "idle"])
        check(await running)
        while "/resume" not in busy.calls:
            await asyncio.sleep(0.01)
    assert "/pause" in busy.calls
    assert not {"/pause", "/resume"} & set(idle.calls)


async def test_answer_that_was_cut_off_after_its_last_token_is_whole(tmp_path: Path) -> None:
    ids = np.array(continuation(PROMPT.token_ids, TOKENS), np.int32)
    rest = np.zeros(TOKENS, np.float32), np.full(TOKENS, 3, np.int32), "partial"
    async with FakeServer("good") as good, fleet_of(tmp_path, good) as fleet:
        for sampling, expected in (
            (Sampling(TOKENS), "length"),
            (Sampling(99, stop_token_ids=(int(ids[-1]),)), "stop"),
        ):
            generate = GroupGenerator(fleet, sampling, watchdog_after=60)
            part = Generated(ids, *rest)  # type: ignore[arg-type]
            (sample,) = await generate(GroupRequest(0, PROMPT, 1, lambda *_: None, lambda *_: None, partial={0: part}))
            assert (sample.finish_reason, len(sample.token_ids)) == (expected, TOKENS)
    assert not good.bodies
