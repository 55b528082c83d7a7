"""Advantages: relative to the group, to the whole batch, to a critic."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.algorithm.advantage import GroupEstimator, gae, group_advantages, reinforce_pp, response_advantages
from dapo_megatron.config.algorithm import AdvantageConfig

GROUP_ESTIMATORS = get_args(GroupEstimator)
TABLE = [
    ([1, -1, -1, -1], "group_norm", [1.4999985, -0.4999995, -0.4999995, -0.4999995], 1e-9),
    ([1, 1, -1, -1], "group_norm", [0.8660247, 0.8660247, -0.8660247, -0.8660247], 1e-6),
    ([1, 0, 0, 1], "leave_one_out", [2 / 3, -2 / 3, -2 / 3, 2 / 3], 1e-12),
    ([1, 0, 0, 0], "group_mean", [0.75, -0.25, -0.25, -0.25], 1e-12),
    ([3, -1, -1, 1], "min_max", [0.625, -0.375, -0.375, 0.125], 1e-12),
]
every_group_estimator = pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
batches = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(-40, 20).map(lambda twentieths: twentieths / 20), st.integers(0, 5)),
    min_size=1,
    max_size=40,
)  # group, reward, length


def tensors(responses: list[tuple[int, float, int]], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Rewards, groups and lengths."""
    groups, rewards, lengths = zip(*responses, strict=True)
    return torch.tensor(rewards, dtype=dtype), torch.tensor(groups, dtype=torch.int32), torch.tensor(lengths)


def options() -> list[AdvantageConfig]:
    """Every estimator with every value of its option."""
    with_std = [AdvantageConfig(estimator="group_norm", std=std) for std in (None, "sample", "population")]
    with_over = [AdvantageConfig(estimator="reinforce_pp", over=over) for over in (None, "tokens", "responses")]
    return with_std + with_over + [AdvantageConfig(estimator=name) for name in GROUP_ESTIMATORS[1:]]


every_option = pytest.mark.parametrize("config", options(), ids=repr)


@pytest.mark.parametrize(("rewards", "estimator", "expected", "tolerance"), TABLE)
def test_table(rewards: list[float], estimator: GroupEstimator, expected: list[float], tolerance: float) -> None:
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), estimator)
    assert result.tolist() == pytest.approx(expected, abs=tolerance)


@every_group_estimator
@pytest.mark.parametrize("rewards", [[1] * 4, [0.3] * 6, [0.7] * 8, [-0.95] * 16, [0.1] * 7, [0.5, 0.5 + 9e-7]])
def test_equal_rewards_give_exactly_zero(rewards: list[float], estimator: GroupEstimator) -> None:
    values = torch.tensor(rewards, dtype=torch.float32)
    result = group_advantages(values, torch.full((len(rewards),), 3), estimator)
    assert result.tolist() == [0.0] * len(rewards)


@every_group_estimator
def test_a_group_of_one_has_no_advantage(estimator: GroupEstimator) -> None:
    result = group_advantages(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([4, 9, 9]), estimator)
    assert result[0] == 0
    assert torch.isfinite(result).all()
    assert result[1] < 0 < result[2]


@every_option
def test_empty_batch(config: AdvantageConfig) -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    assert response_advantages(torch.zeros(0), nothing, nothing, config).shape == (0,)
    assert gae(torch.zeros(0), torch.zeros(0), nothing, 1.0, 0.95, whiten=True).shape == (0,)
    assert reinforce_pp(torch.zeros(0), nothing).shape == (0,)


def test_an_unknown_option_is_refused() -> None:
    rewards, groups = torch.tensor([1.0, -1.0]), torch.zeros(2, dtype=torch.int32)
    for unknown in ({"estimator": "group_median"}, {"std": "biased"}):
        with pytest.raises(KeyError):
            group_advantages(rewards, groups, **unknown)
    with pytest.raises(KeyError):
        reinforce_pp(rewards, groups, over="groups")


@settings(deadline=None)
@given(batches, st.sampled_from([(torch.float32, 1e-4), (torch.float64, 1e-12)]), st.sampled_from(GROUP_ESTIMATORS))
def test_each_group_alone_gives_the_same(
    responses: list[tuple[int, float, int]], precision: tuple[torch.dtype, float], estimator: GroupEstimator
) -> None:
    """Members count by id wherever they stand, and no group touches another."""
    dtype, tolerance = precision
    rewards, groups, _ = tensors(responses, dtype)
    advantages = group_advantages(rewards, groups, estimator)
    for group in set(groups.tolist()):
        own = rewards[groups == group]
        mixed = bool((own != own[0]).any())
        expected = plain(own, estimator) if mixed else torch.zeros_like(own)
        torch.testing.assert_close(advantages[groups == group], expected, rtol=0, atol=tolerance)


def plain(own: Tensor, estimator: GroupEstimator) -> Tensor:
    """The definition, for one group."""
    if estimator == "group_norm":
        return (own - own.mean()) / (own.std() + 1e-6)
    if estimator == "group_mean":
        return own - own.mean()
    if estimator == "leave_one_out":
        return torch.stack([own[i] - torch.cat([own[:i], own[i + 1 :]]).mean() for i in range(len(own))])
    stretched = (own - own.min()) / (own.max() - own.min())
    return stretched - stretched.mean()


@every_option
@settings(deadline=None)
@given(responses=batches, data=st.data())
def test_permuting_samples_groups_or_ids_changes_nothing(
    config: AdvantageConfig, responses: list[tuple[int, float, int]], data: st.DataObject
) -> None:
    rewards, groups, lengths = tensors(responses)
    expected = response_advantages(rewards, groups, lengths, config)
    order = torch.tensor(data.draw(st.permutations(range(len(responses)))))
    names = torch.tensor(data.draw(st.permutations([-7, 0, 3, 10, 2**31 - 1])))
    permuted = response_advantages(rewards[order], names[groups.long() + 2][order], lengths[order], config)
    # 1e-9: whitening divides by as little as 1e-4 what remains of rounding.
    torch.testing.assert_close(permuted, expected[order], rtol=0, atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=16), st.floats(1, 1000))
def test_scaling_rewards_hardly_changes_group_norm(rewards: list[float], scale: float) -> None:
    """By at most |A| 1e-6 / std: only the 1e-6 beside the deviation sees it. |A| < 2 in groups of up to 5."""
    values, group = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int32)
    std = values.std()
    change = (group_advantages(scale * values, group) - group_advantages(values, group)).abs()
    rounding = 1e-12 / std
    assert bool((std == 0) | (change <= (values - values.mean()).abs() / std * 1e-6 / std + rounding).all())
    if len(rewards) <= 5:
        assert bool((std == 0) | (change <= 2e-6 / std).all())


@pytest.mark.parametrize(("over", "counts"), [("tokens", [1, 3, 0, 2]), ("responses", [1, 1, 1, 1])])
def test_whitening_counts_tokens_or_responses(over: str, counts: list[int]) -> None:
    """A response without tokens is no token, but it is a response."""
    rewards, lengths = torch.tensor([1.0, -1.0, 0.5, 0.25], dtype=torch.float64), torch.tensor([1, 3, 0, 2])
    population = rewards.repeat_interleave(torch.tensor(counts))
    expected = (rewards - population.mean()) / (population.var() + 1e-8).sqrt()
    per_response = response_advantages(
        rewards, torch.arange(4), lengths, AdvantageConfig(estimator="reinforce_pp", over=over)
    )
    torch.testing.assert_close(per_response, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(reinforce_pp(rewards, lengths, over), expected[[0, 1, 1, 1, 3, 3]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("over", ["tokens", "responses"])
@pytest.mark.parametrize("lengths", [[3, 5, 1, 7, 2, 2], [0, 0, 4, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6])
def test_whitening_equal_rewards_gives_exactly_zero(over: str, lengths: list[int]) -> None:
    result = reinforce_pp(torch.full((6,), 0.3), torch.tensor(lengths), over)
    assert result.tolist() == [0.0] * sum(lengths)


def test_without_any_token_there_is_no_advantage() -> None:
    rewards, lengths = torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    result = response_advantages(rewards, torch.tensor([0, 0]), lengths, AdvantageConfig(estimator="reinforce_pp"))
    assert result.tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.integers(0, 2**31),
)
def test_gae_is_its_recursion(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    expected: list[float] = []
    for reward, own in zip(rewards.tolist(), values.split(lengths) if lengths else [], strict=True):
        advantage, following, backwards = 0.0, 0.0, []
        for t, value in enumerate(reversed(own.tolist())):
            delta = (reward if t == 0 else 0.0) + gamma * following - value
            advantage, following = delta + gamma * lam * advantage, value
            backwards.append(advantage)
        expected += reversed(backwards)
    result = gae(rewards, values, torch.tensor(lengths, dtype=torch.int64), gamma, lam)
    assert result.tolist() == pytest.approx(expected, abs=1e-12)


def test_gae_keeps_responses_apart() -> None:
    values = torch.tensor([0.5, 0.25, math.nan, math.inf, 1.0])
    result = gae(torch.tensor([1.0, 2.0, 3.0]), values, torch.tensor([2, 2, 1]), 1.0, 1.0)
    assert result[[0, 1, 4]].tolist() == [0.5, 0.75, 2.0]


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    values = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    result = gae(torch.tensor([2.0], dtype=torch.float64), values, torch.tensor([1000]), 1.0, 1.0)
    torch.testing.assert_close(result, 2 - values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"estimator": "group_mean", "std": "population"}, r"std \(population\) is read by the estimator group_norm"),
        ({"estimator": "reinforce_pp", "std": "sample"}, "only, not by reinforce_pp: leave std out"),
        ({"over": "tokens"}, r"over \(tokens\) is read by the estimator reinforce_pp only, not by group_norm"),
        ({"gamma": "0.9"}, r"gamma \(0.9\) is read by the estimator gae only, not by group_norm"),
        ({"estimator": "mean"}, "'group_norm', 'group_mean', 'leave_one_out', 'min_max', 'reinforce_pp' or 'gae'"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(options: dict[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        AdvantageConfig.model_validate(options)


@every_option
def test_a_written_config_reads_back(config: AdvantageConfig) -> None:
    assert AdvantageConfig.model_validate_json(config.model_dump_json()) == config


@every_option
def test_each_option_reaches_its_function(config: AdvantageConfig) -> None:
    rewards, groups, lengths = tensors([(0, 1.0, 2), (1, -1.0, 3), (0, -0.5, 1), (1, 1.0, 0), (0, -1.0, 5)])
    result = response_advantages(rewards, groups, lengths, config)
    if config.estimator == "reinforce_pp":
        per_token = reinforce_pp(rewards, lengths, config.over or "tokens")
        torch.testing.assert_close(result.repeat_interleave(lengths), per_token, rtol=0, atol=0)
    else:
        assert result.equal(group_advantages(rewards, groups, config.estimator, config.std or "sample"))
