"""Advantages from rewards of steps: values by hand, and the definition written as loops."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.algorithm.advantage import GroupEstimator, gae, group_advantages, response_advantages
from dapo_megatron.algorithm.process_rewards import process_advantages, token_rewards
from dapo_megatron.config.algorithm import AdvantageConfig
from dapo_megatron.rollout.blocks import build_batch
from dapo_megatron.trainer.advantages import batch_advantages, step_tensors
from dapo_megatron.types import BatchHeader, Group, Prompt, Sample, Steps

Step = tuple[int, int, float]  # response, place, reward

CONFIGS = [
    *(AdvantageConfig(estimator=name) for name in get_args(GroupEstimator)),
    AdvantageConfig(estimator="group_norm", std="population"),
    AdvantageConfig(estimator="reinforce_pp"),
    AdvantageConfig(estimator="reinforce_pp", over="responses"),
]
every_option = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.estimator}-{c.std or c.over}")


def advantages(
    config: AdvantageConfig,
    steps: list[Step],
    responses: list[tuple[int, float, int]],
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """Responses are (group, reward, length)."""
    columns = list(zip(*steps, strict=True)) or [(), (), ()]
    groups, rewards, lengths = zip(*responses, strict=True)
    result = process_advantages(
        torch.tensor(columns[2], dtype=dtype),
        torch.tensor(columns[0], dtype=torch.int32),
        torch.tensor(columns[1], dtype=torch.int32),
        torch.tensor(rewards, dtype=dtype),
        torch.tensor(groups, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        config,
    )
    assert result.dtype == dtype
    return result.tolist()


# Group 0: steps 1 and 0 after tokens 1 and 3, 0 and 1 after tokens 0 and 2. Group 1: a step of 5 alone is compared with
# itself, and a response has no tokens.
RESPONSES = [(0, 1.0, 4), (0, -1.0, 3), (1, 1.0, 2), (1, -1.0, 0)]
STEPS = [(0, 1, 1.0), (0, 3, 0.0), (1, 0, 0.0), (1, 2, 1.0), (2, 0, 5.0)]


@pytest.mark.parametrize(
    ("config", "step", "outcome"),
    [
        # std of 1, 0, 0, 1 is sqrt(1/3), of 1, -1 sqrt(2)
        (AdvantageConfig(), 0.5 / (1 / 3**0.5 + 1e-6), 1 / (2**0.5 + 1e-6)),
        (AdvantageConfig(std="population"), 0.5 / (0.5 + 1e-6), 1 / (1 + 1e-6)),
        (AdvantageConfig(estimator="group_mean"), 0.5, 1.0),
        (AdvantageConfig(estimator="leave_one_out"), 1 - 1 / 3, 2.0),
        (AdvantageConfig(estimator="min_max"), 0.5, 0.5),
    ],
)
def test_golden_process_supervision(config: AdvantageConfig, step: float, outcome: float) -> None:
    first = [outcome, outcome, outcome - step, outcome - step]  # the first step's gain and the second's loss cancel
    second = [-outcome, step - outcome, step - outcome]
    expected = [*first, *second, outcome, outcome]
    assert advantages(config, STEPS, RESPONSES) == pytest.approx(expected, abs=1e-12)
    assert advantages(config, STEPS, RESPONSES, torch.float32) == pytest.approx(expected, abs=1e-6)


def test_golden_returns_are_whitened() -> None:
    # Returns: 1 + 1 and 1 of the first response, -1 of the second.
    steps, responses = [(0, 0, 1.0)], [(0, 1.0, 2), (0, -1.0, 1)]
    over_tokens = [x / (42 / 18 + 1e-8) ** 0.5 for x in (4 / 3, 1 / 3, -5 / 3)]
    assert advantages(CONFIGS[-2], steps, responses) == pytest.approx(over_tokens, abs=1e-12)
    over_responses = [x / (3.375 + 1e-8) ** 0.5 for x in (1.75, 0.75, -1.25)]  # weights 1/2, 1/2 and 1
    assert advantages(CONFIGS[-1], steps, responses) == pytest.approx(over_responses, abs=1e-12)


def test_tokens_after_the_last_step_get_the_outcome_alone_exactly() -> None:
    steps = [(0, place, 0.1 * place) for place in range(7)] + [(1, 3, 0.3)]
    config = AdvantageConfig(estimator="group_mean")
    result = advantages(config, steps, [(0, 0.3, 10), (0, 0.1, 9)])
    (a, b) = group_advantages(
        torch.tensor([0.3, 0.1], dtype=torch.float64), torch.tensor([0, 0]), "group_mean"
    ).tolist()
    assert result[7:10] == [a] * 3
    assert result[14:] == [b] * 5


def test_equal_step_rewards_add_exactly_nothing() -> None:
    responses = [(0, 1.0, 3), (0, -1.0, 3)]
    steps = [(r, place, 0.3) for r in range(2) for place in range(3)]
    config = AdvantageConfig()
    assert advantages(config, steps, responses, torch.float32) == advantages(config, [], responses, torch.float32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Step], list[tuple[int, float, int]]]:
    numbers = st.integers(-8, 8).map(lambda n: n / 4)
    responses = draw(st.lists(st.tuples(st.integers(0, 2), numbers, st.integers(0, 5)), min_size=1, max_size=8))
    places = [(r, place) for r, (_, _, length) in enumerate(responses) for place in range(length)]
    chosen = draw(st.lists(st.sampled_from(places), max_size=20)) if places else []  # in any order, and more than once
    return [(r, place, draw(numbers)) for r, place in chosen], responses


def by_loops(config: AdvantageConfig, steps: list[Step], responses: list[tuple[int, float, int]]) -> list[float]:
    """The definition, token by token."""
    groups, rewards, lengths = (torch.tensor(column) for column in zip(*responses, strict=True))
    outcome, values = rewards.double(), torch.tensor([step[2] for step in steps], dtype=torch.float64)
    if config.estimator not in ("reinforce_pp", "gae"):
        members = groups[torch.tensor([step[0] for step in steps], dtype=torch.long)]
        values = group_advantages(values, members, config.estimator, config.std or "sample")
        outcome = response_advantages(outcome, groups, lengths, config)
    rows = [
        [
            float(outcome[r])
            + sum(float(v) for (s, end, _), v in zip(steps, values, strict=True) if s == r and end >= t)
            for t in range(length)
        ]
        for r, (_, _, length) in enumerate(responses)
    ]
    if config.estimator != "reinforce_pp":
        return [value for row in rows for value in row]
    weighted = [(value, 1 / len(row) if config.over else 1.0) for row in rows for value in row]
    if config.over:
        weighted += [(float(rewards[r]), 1.0) for r, row in enumerate(rows) if not row]
    total = sum(weight for _, weight in weighted)
    mean = sum(value * weight for value, weight in weighted) / total if total else 0.0
    variance = sum((value - mean) ** 2 * weight for value, weight in weighted) / max(total - 1, 1)
    return [(value - mean) / (variance + 1e-8) ** 0.5 for row in rows for value in row]


@every_option
@settings(max_examples=40, deadline=None)
@given(batch=batches(), data=st.data())
def test_it_is_the_definition_in_any_order_of_the_steps(
    config: AdvantageConfig, batch: Any, data: st.DataObject
) -> None:
    steps, responses = batch
    result = advantages(config, steps, responses)
    assert result == pytest.approx(by_loops(config, steps, responses), abs=1e-6)
    assert advantages(config, data.draw(st.permutations(steps)), responses) == pytest.approx(result, abs=1e-6)


@every_option
@settings(max_examples=40, deadline=None)
@given(batch=batches(), data=st.data())
def test_permuted_responses_have_their_advantages(config: AdvantageConfig, batch: Any, data: st.DataObject) -> None:
    steps, responses = batch
    order = data.draw(st.permutations(range(len(responses))))
    moved = {r: new for new, r in enumerate(order)}
    result = iter(advantages(config, steps, responses))
    rows = [[next(result) for _ in range(length)] for _, _, length in responses]
    permuted = advantages(config, [(moved[r], p, v) for r, p, v in steps], [responses[r] for r in order])
    assert permuted == pytest.approx([value for r in order for value in rows[r]], abs=1e-6)


@every_option
@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_without_steps_it_is_the_advantage_of_the_response(config: AdvantageConfig, batch: Any) -> None:
    _, responses = batch
    groups, rewards, lengths = (torch.tensor(column) for column in zip(*responses, strict=True))
    expected = response_advantages(rewards.double(), groups, lengths, config).repeat_interleave(lengths)
    assert advantages(config, [], responses) == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize(("with_steps", "message"), [(True, "token_rewards"), (False, "a critic's values")])
def test_gae_is_referred_to_its_own_function(with_steps: bool, message: str) -> None:
    batch = header(with_steps)
    with pytest.raises(ValueError, match=message):
        batch_advantages(batch, AdvantageConfig(estimator="gae"), torch.from_numpy(batch.rewards))


# Rewards per token, for gae


def per_token(steps: list[Step], lengths: list[int]) -> Tensor:
    columns = list(zip(*steps, strict=True)) or [(), (), ()]
    responses, places = (torch.tensor(column, dtype=torch.int32) for column in columns[:2])
    return token_rewards(torch.tensor(columns[2], dtype=torch.float64), responses, places, torch.tensor(lengths))


def test_token_rewards_stand_where_their_steps_end() -> None:
    steps = [(2, 1, 0.5), (0, 1, 1.0), (2, 1, 0.25), (2, 0, -1.0)]
    assert per_token(steps, [2, 0, 3]).tolist() == [0.0, 1.0, -1.0, 0.75, 0.0]
    assert per_token([], [2, 1]).tolist() == [0.0, 0.0, 0.0]


def test_golden_gae_with_token_rewards() -> None:
    # gamma 0.5, lambda 1: A_t = discounted sum of rewards from t on, minus V_t. Rewards 4, 0, 2 and 8.
    rewards, values = torch.tensor([2.0, 8.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    earned = torch.tensor([4.0, 0.0, 0.0, 0.0])
    result = gae(rewards, values, torch.tensor([3, 1]), gamma=0.5, lam=1.0, token_rewards=earned)
    assert result.tolist() == [4.0 + 0.5 - 1.0, 1.0 - 2.0, 2.0 - 3.0, 8.0 - 4.0]
    whitened = gae(rewards, values, torch.tensor([3, 1]), gamma=0.5, lam=1.0, whiten=True, token_rewards=earned)
    torch.testing.assert_close(whitened, (result - result.mean()) / (result.var() + 1e-8).sqrt(), rtol=1e-6, atol=0)


@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_undiscounted_gae_without_values_is_the_return(batch: Any) -> None:
    steps, responses = batch
    lengths = [length for _, _, length in responses]
    rewards = torch.tensor([reward for _, reward, _ in responses], dtype=torch.float64)
    earned = per_token(steps, lengths)
    result = gae(rewards, torch.zeros_like(earned), torch.tensor(lengths), gamma=1.0, lam=1.0, token_rewards=earned)
    expected = [
        reward + sum(v for s, end, v in steps if s == r and end >= t)
        for r, (_, reward, length) in enumerate(responses)
        for t in range(length)
    ]
    assert result.tolist() == pytest.approx(expected, abs=1e-9)


# From a header


def header(with_steps: bool) -> BatchHeader:
    def sample(length: int, reward: float, places: list[int], rewards: list[float]) -> Sample:
        steps = Steps(np.array(places, np.int32), np.array(rewards, np.float32))
        tokens = np.zeros(length, np.int32)
        return Sample(
            tokens, tokens.astype(np.float32), "stop", tokens, reward > 0, reward, float(reward > 0), steps=steps
        )

    prompts = [Prompt(id=i, token_ids=(1,), ground_truth="") for i in range(2)]
    groups = [
        Group(0, prompts[0], (sample(4, 1.0, [1, 3], [1.0, 0.0]), sample(3, -1.0, [0, 2], [0.0, 1.0]))),
        Group(1, prompts[1], (sample(2, 1.0, [0], [5.0]), sample(0, -1.0, [], []))),
    ]
    batch, _ = build_batch(1, groups, {}, {})
    nothing = {f"step_{name}": getattr(batch, f"step_{name}")[:0] for name in ("responses", "places", "rewards")}
    return batch if with_steps else replace(batch, **nothing)


@every_option
def test_a_batch_has_the_advantages_of_its_header(config: AdvantageConfig) -> None:
    batch = header(with_steps=True)
    rewards, responses, places = (tensor.tolist() for tensor in step_tensors(batch))
    assert list(zip(responses, places, rewards, strict=True)) == STEPS
    penalised = torch.tensor([0.5, -1.0, 1.0, -1.0])
    expected = advantages(config, STEPS, [(0, 0.5, 4), *RESPONSES[1:]], torch.float32)
    assert batch_advantages(batch, config, penalised).tolist() == expected


@every_option
def test_a_batch_without_process_rewards_has_those_of_its_responses(config: AdvantageConfig) -> None:
    batch = header(with_steps=False)
    rewards, groups, lengths = map(torch.from_numpy, (batch.rewards, batch.groups, batch.response_lengths))
    expected = response_advantages(rewards, groups, lengths, config).repeat_interleave(lengths)
    assert batch_advantages(batch, config, rewards).equal(expected)
