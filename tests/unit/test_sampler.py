"""Dynamic sampling: laws 5 (nothing lost) and 7 (draw order decides, never speed)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest, Progress, SampledBatch, Sampler
from dapo_megatron.types import Prompt, Sample

GROUP = 4
MIXED, RIGHT, WRONG, FAILED = "mixed", "right", "wrong", "failed"


def answer(correct: bool, length: int = 3) -> Sample:
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        log_probs=np.zeros(length, np.float32),
        finish_reason="stop",
        versions=np.zeros(length, np.int32),
        correct=correct,
        reward=1.0 if correct else -1.0,
        score=float(correct),
    )


@dataclass
class World:
    """Prompts with fixed outcomes, and how many turns of the event loop each generation takes."""

    outcomes: list[str]
    turns: list[int]
    running: int = 0
    most_running: int = 0
    calls: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = [Prompt(id=i, token_ids=(i,), ground_truth="") for i in range(len(self.outcomes))]

    async def generate(self, request: GroupRequest) -> tuple[Sample, ...]:
        prompt = request.prompt
        call, self.calls = self.calls, self.calls + 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.turns[call % len(self.turns)]):
                await asyncio.sleep(0)
            return self.group(prompt, request.size, request.on_answer)
        except asyncio.CancelledError:
            self.events.append(("aborted", prompt.id))
            raise
        finally:
            self.running -= 1

    def group(self, prompt: Prompt, size: int, on_answer: Callable[[int, Sample], None]) -> tuple[Sample, ...]:
        outcome = self.outcomes[prompt.id]
        self.events.append((outcome, prompt.id))
        if outcome == FAILED:
            raise GroupFailedError
        right = {MIXED: 1, RIGHT: size, WRONG: 0}[outcome]
        samples = tuple(answer(i < right, length=1 + prompt.id % 5) for i in range(size))
        for place, sample in enumerate(samples):
            on_answer(place, sample)
        return samples

    def cursor(self) -> PromptCursor:
        return PromptCursor(len(self.prompts), seed=3, shuffle=True)


def rollout(needed: int, **changes: object) -> RolloutConfig:
    return RolloutConfig.model_validate({"prompts_per_step": needed, "samples_per_prompt": GROUP} | changes)


def expected_draws(world: World, config: RolloutConfig, first: int) -> tuple[list[int], int]:
    """Drawing one prompt after the other: the draws that are kept, and where the next step begins."""
    cursor = world.cursor()
    accepted = {MIXED} if config.dynamic_sampling else {MIXED, RIGHT, WRONG}
    indices = [cursor.draw() for _ in range(first + (config.prompt_budget or 10_000))]
    kept: list[int] = []
    for draw in range(first, len(indices)):
        if world.outcomes[indices[draw]] in accepted:
            kept.append(draw)
        if len(kept) == config.prompts_per_step:
            return kept, draw + 1
    return kept, len(indices)


def check_conservation(stats: dict[str, float]) -> None:
    dropped = stats["all_right"] + stats["all_wrong"] + stats["failed"]
    assert stats["drawn"] == stats["kept"] + dropped + stats["requeued"]
    assert stats["requeued"] == stats["surplus"] + stats["aborted"]


@settings(max_examples=100, deadline=None)
@given(
    outcomes=st.lists(st.sampled_from([MIXED, MIXED, RIGHT, WRONG, WRONG, FAILED]), min_size=1, max_size=25),
    turns=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    needed=st.integers(1, 6),
    max_rounds=st.integers(1, 4),
    max_in_flight=st.one_of(st.none(), st.integers(1, 40)),
    dynamic=st.booleans(),
)
def test_any_finish_order_and_any_number_in_flight_give_the_batches_of_drawing_one_by_one(
    outcomes: list[str], turns: list[int], needed: int, max_rounds: int, max_in_flight: int | None, dynamic: bool
) -> None:
    world = World(outcomes, turns)
    config = rollout(needed, max_rounds=max_rounds, dynamic_sampling=dynamic)
    cursor = world.cursor()
    bound = None if max_in_flight is None else lambda: max_in_flight * GROUP
    sampler = Sampler(world.prompts, cursor, config, world.generate, bound)
    begin = 0
    for _ in range(3):
        progress = Progress()
        batch = asyncio.run(sampler.sample_batch(progress))
        kept, end = expected_draws(world, config, begin)
        assert [group.draw for group in batch.groups] == kept
        assert batch.cursor["drawn"] == end
        assert batch.exhausted == (len(kept) < needed)
        assert batch.stats["drawn"] - batch.stats["requeued"] == end - begin
        assert batch.stats["drawn"] <= needed * max_rounds
        assert progress.kept == len(kept)
        check_conservation(batch.stats)
        assert world.running == 0
        begin = end
    if max_in_flight is not None:
        assert world.most_running <= max_in_flight


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.integers(0, 30), min_size=1, max_size=20), needed=st.integers(1, 5))
def test_a_group_is_aborted_only_when_enough_groups_drawn_before_it_are_complete(turns: list[int], needed: int) -> None:
    world = World([MIXED, WRONG, MIXED, RIGHT, WRONG, MIXED, WRONG] * 10, turns)
    cursor = world.cursor()
    order = [cursor.draw() for _ in world.prompts]
    asyncio.run(Sampler(world.prompts, world.cursor(), rollout(needed), world.generate).sample_batch(Progress()))
    for position, (event, prompt) in enumerate(world.events):
        if event == "aborted":
            before = {p for e, p in world.events[:position] if e == MIXED}
            assert sum(p in before for p in order[: order.index(prompt)]) >= needed


def sample(world: World, config: RolloutConfig) -> SampledBatch:
    return asyncio.run(Sampler(world.prompts, world.cursor(), config, world.generate).sample_batch(Progress()))


def test_fast_short_groups_do_not_displace_slow_ones_drawn_earlier() -> None:
    world = World([MIXED] * 20, turns=[50, 50, 0, 0, 0, 0])
    assert [group.draw for group in sample(world, rollout(2)).groups] == [0, 1]


def test_an_exhausted_budget_gives_a_smaller_batch_without_uniform_groups() -> None:
    batch = sample(World([WRONG, RIGHT, MIXED, WRONG, WRONG, WRONG], [1]), rollout(3, max_prompts_per_step=6))
    assert batch.exhausted
    assert [sum(s.correct for s in group.samples) for group in batch.groups] == [1]
    assert batch.stats["all_wrong"] == 4
    assert batch.stats["all_right"] == 1


def test_no_mixed_group_at_all_gives_an_empty_batch() -> None:
    batch = sample(World([WRONG] * 5, [1]), rollout(2, max_rounds=2))
    assert batch.exhausted
    assert batch.groups == ()
    assert batch.stats["drawn"] == batch.stats["all_wrong"] == 4


def test_wait_next_goes_on_with_a_new_budget_and_the_groups_kept_so_far() -> None:
    world = World([WRONG, WRONG, MIXED, WRONG, WRONG, WRONG, WRONG, MIXED], [1])
    config = rollout(2, max_prompts_per_step=3, on_exhausted="wait_next")
    batch = sample(world, config)
    assert not batch.exhausted
    assert len(batch.groups) == 2
    assert batch.stats["drawn"] > 3
    check_conservation(batch.stats)


def test_statistics_are_of_the_draws_up_to_the_last_kept_group() -> None:
    world = World([MIXED, RIGHT, WRONG, FAILED, MIXED, WRONG], [0])
    cursor = PromptCursor(6, seed=0, shuffle=False)
    sampler = Sampler(world.prompts, cursor, rollout(2), world.generate)
    progress = Progress()
    stats = asyncio.run(sampler.sample_batch(progress)).stats
    assert (stats["kept"], stats["all_right"], stats["all_wrong"], stats["failed"]) == (2, 1, 1, 1)
    assert stats["accuracy"] == pytest.approx((1 + 4 + 0 + 1) / 16)
    assert stats["response_length"] == pytest.approx((1 + 5) / 2)
    assert stats["response_length_max"] == 5
    assert stats["length_ratio"] == pytest.approx(3 / ((1 + 2 + 3 + 5) / 4))
    assert stats["reward"] == pytest.approx(-0.5)
    assert stats["truncated"] == 0
    assert stats["generated_tokens"] == progress.tokens


def test_a_cancelled_or_failing_sampling_leaves_the_cursor_where_it_was_and_nothing_running() -> None:
    async def broken(request: GroupRequest) -> tuple[Sample, ...]:
        raise ZeroDivisionError

    async def scenario() -> None:
        world = World([MIXED] * 8, [10**6])
        cursor = world.cursor()
        task = asyncio.create_task(Sampler(world.prompts, cursor, rollout(4), world.generate).sample_batch(Progress()))
        await asyncio.sleep(0.01)
        assert world.running == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (world.running, cursor.drawn) == (0, 0)
        with pytest.raises(ZeroDivisionError):
            await Sampler(world.prompts, cursor, rollout(4), broken).sample_batch(Progress())
        assert cursor.drawn == 0

    asyncio.run(scenario())


def test_an_error_of_a_group_that_is_being_stopped_ends_the_run() -> None:
    """Such as tokens of weights that their server cannot have: the batch is complete without that group."""

    async def scenario() -> None:
        world = World([RIGHT] * 100, [1])
        cursor = world.cursor()

        async def generate(request: GroupRequest) -> tuple[Sample, ...]:
            if request.draw < 8:
                return await world.generate(request)
            if request.draw == 8:
                return answer(True), *[answer(False)] * (GROUP - 1)
            try:
                await asyncio.sleep(3600)
            finally:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await Sampler(world.prompts, cursor, rollout(1), generate).sample_batch(Progress())
        assert cursor.drawn == 0
        with pytest.raises(ZeroDivisionError):  # and where the step is cancelled
            async with asyncio.timeout(0.01):
                await Sampler(world.prompts, cursor, rollout(2), generate).sample_batch(Progress())
        assert cursor.drawn == 0

    asyncio.run(scenario())
