"""Dynamic sampling with a history that acts and groups of varying size: the laws of test_sampler.py still hold."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.rollout.sampler import Progress, SampledBatch, Sampler
from dapo_megatron.rollout.statistics import OUTCOMES
from tests.unit.test_sampler import FAILED, GROUP, MIXED, RIGHT, WRONG, World, check_conservation, rollout

ADAPTIVE = {"adaptive_group": {"sizes": [2, 3, GROUP], "acceptance": 0.6}}
RULES = {"rest_after": 1, "rest_epochs": 1, "hard_every": 3}
WHAT_DEPENDS_ON_TIMING = {"drawn", "requeued", "surplus", "aborted", "seconds", "generated_tokens", "overhead"} | {
    f"{kind}/{outcome}" for kind in ("answers", "tokens") for outcome in ("failed", "surplus", "aborted")
}


def play(world: World, config: RolloutConfig, steps: int, max_answers: int | None, resumed: bool) -> list[SampledBatch]:
    """Batches of a run; where `resumed`, each by a new sampler from the state that the one before left."""

    def cursor(state: dict[str, Any] | None) -> PromptCursor:
        made = PromptCursor(len(world.prompts), seed=3, shuffle=True, rules=config.history)
        if state is not None:
            made.load_state_dict(json.loads(json.dumps(state)))
        return made

    batches: list[SampledBatch] = []
    bound = None if max_answers is None else lambda: max_answers
    sampler = Sampler(world.prompts, cursor(None), config, world.generate, bound)
    for _ in range(steps):
        if resumed and batches:
            sampler = Sampler(world.prompts, cursor(batches[-1].cursor), config, world.generate, bound)
        progress = Progress()
        batches.append(asyncio.run(sampler.sample_batch(progress)))
        check_costs(batches[-1], progress)
    return batches


def check_costs(batch: SampledBatch, progress: Progress) -> None:
    check_conservation(batch.stats)
    assert batch.stats["generated_tokens"] == progress.tokens
    assert sum(batch.stats[f"tokens/{outcome}"] for outcome in OUTCOMES) == progress.tokens
    assert sum(batch.stats[f"answers/{outcome}"] for outcome in OUTCOMES) == progress.answers


def essence(batch: SampledBatch) -> dict[str, Any]:
    """What must not depend on timing."""
    return {
        "groups": [(group.draw, group.prompt.id, len(group.samples)) for group in batch.groups],
        "stats": {key: repr(value) for key, value in batch.stats.items() if key not in WHAT_DEPENDS_ON_TIMING},
        "cursor": batch.cursor,
        "exhausted": batch.exhausted,
    }


@settings(max_examples=40, deadline=None)
@given(
    outcomes=st.lists(st.sampled_from([MIXED, MIXED, RIGHT, WRONG, FAILED]), min_size=1, max_size=12),
    turns=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    needed=st.integers(1, 5),
    max_answers=st.none() | st.integers(1, 60),
    on_exhausted=st.sampled_from(["train_smaller", "stop"]),
    adaptive=st.booleans(),
)
def test_timing_and_resuming_change_nothing(
    outcomes: list[str], turns: list[int], needed: int, max_answers: int | None, on_exhausted: str, adaptive: bool
) -> None:
    options = {"history": RULES, "max_rounds": 3, "on_exhausted": on_exhausted} | (ADAPTIVE if adaptive else {})
    config = rollout(needed, **options)
    one_by_one = play(World(outcomes, [0]), config, steps=4, max_answers=1, resumed=False)
    other = play(World(outcomes, turns), config, steps=4, max_answers=max_answers, resumed=True)
    assert [essence(batch) for batch in other] == [essence(batch) for batch in one_by_one]
    assert one_by_one[-1].stats["drawn"] <= 3 * needed


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.booleans(), min_size=1, max_size=10).filter(any),
    extra=st.lists(st.tuples(st.integers(0, 10), st.sampled_from([RIGHT, WRONG, FAILED])), max_size=10),
    needed=st.integers(1, 4),
)
def test_a_group_of_equal_answers_changes_nothing_of_the_batch(
    labels: list[bool], extra: list[tuple[int, str]], needed: int
) -> None:
    """However many of them are drawn in between. Prompts are told apart by name, since their numbers shift."""
    named = [(f"{i}", MIXED if mixed else WRONG) for i, mixed in enumerate(labels)]
    more = list(named)
    for place, outcome in extra:
        more.insert(place, ("extra", outcome))

    def batch(prompts: list[tuple[str, str]]) -> list[tuple[str, list[bool]]]:
        world = World([outcome for _, outcome in prompts], [3, 0, 7, 1])
        cursor = PromptCursor(len(prompts), seed=0, shuffle=False)
        sampled = asyncio.run(
            Sampler(world.prompts, cursor, rollout(needed, max_rounds=None), world.generate).sample_batch(Progress())
        )
        return [(prompts[g.prompt.id][0], [sample.correct for sample in g.samples]) for g in sampled.groups]

    assert batch(more) == batch(named)


def test_the_size_of_groups_follows_the_running_accuracy() -> None:
    world = World([MIXED, RIGHT] * 4, [1])
    easy = {"sizes": [2, 3, GROUP], "acceptance": 0.7}
    batches = play(world, rollout(4, adaptive_group=easy, max_rounds=None), 4, None, resumed=False)
    sizes = [batch.stats["group_size"] for batch in batches]
    assert sizes[0] == GROUP  # nothing is known yet
    for before, batch in pairwise(batches):
        right, answers, *_ = before.cursor["history"]["running"]
        accuracy = right / answers
        fitting = [g for g in (2, 3) if 1 - accuracy**g - (1 - accuracy) ** g >= 0.7]
        assert batch.stats["group_size"] == (fitting or [GROUP])[0]
        assert {len(group.samples) for group in batch.groups} == {batch.stats["group_size"]}
    assert len(set(sizes)) > 1


def test_prompts_that_rest_and_hard_ones_are_counted() -> None:
    world = World([RIGHT, WRONG, MIXED, MIXED], [1])
    config = rollout(2, history={"rest_after": 1, "hard_every": 2}, max_rounds=None)
    first, second, third = play(world, config, 3, None, resumed=False)
    assert (first.stats["rested"], first.stats["hard_draws"]) == (0, 0)
    assert sum(first.stats[f"history/{verdict}"] for verdict in ("solved", "unsolvable", "mixed")) == len(
        first.cursor["history"]["prompts"]
    )
    assert second.stats["rested"] + third.stats["rested"] > 0
    assert second.stats["hard_draws"] + third.stats["hard_draws"] > 0
    assert third.stats["history/solved"] == third.stats["history/unsolvable"] == 1


def test_acceptance_is_measured_and_forecast() -> None:
    world = World([MIXED, WRONG] * 4, [1])
    first, second = play(world, rollout(4, max_rounds=None), 2, None, resumed=False)
    assert first.stats["acceptance_forecast"] == 1.0  # nothing is known yet
    assert first.stats["acceptance"] == 4 / (first.stats["drawn"] - first.stats["requeued"])
    assert 0 < second.stats["acceptance_forecast"] < 1


def test_a_run_in_which_every_prompt_rests_goes_on() -> None:
    world = World([RIGHT] * 3, [1])
    batches = play(world, rollout(2, history=RULES, max_rounds=4), 5, None, resumed=True)
    assert all(batch.exhausted and batch.stats["all_right"] == 8 for batch in batches)
    assert batches[-1].cursor["drawn"] == 40


def test_wait_next_holds_with_all_options() -> None:
    world = World([WRONG, RIGHT, WRONG, RIGHT, WRONG, MIXED], [1])
    config = rollout(2, max_prompts_per_step=2, on_exhausted="wait_next", history=RULES, **ADAPTIVE)
    for batch in play(world, config, 4, None, resumed=True):
        assert (len(batch.groups), batch.exhausted) == (2, False)


def test_failing_sampling_changes_neither_order_nor_history() -> None:
    world = World([MIXED, RIGHT, WRONG], [1])
    config = rollout(1, history=RULES, max_rounds=None)
    cursor = PromptCursor(3, seed=3, shuffle=True, rules=config.history)
    asyncio.run(Sampler(world.prompts, cursor, config, world.generate).sample_batch(Progress()))
    before = cursor.state_dict()

    async def broken(*_: object) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(Sampler(world.prompts, cursor, config, broken).sample_batch(Progress()))
    assert cursor.state_dict() == before
