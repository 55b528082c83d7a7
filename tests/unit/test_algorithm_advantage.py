"""Group-relative advantages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm.advantage import group_advantages

TABLE = [
    ([1, -1, -1, -1], [1.4999985, -0.4999995, -0.4999995, -0.4999995], 1e-9),
    ([1, 1, -1, -1], [0.8660247, 0.8660247, -0.8660247, -0.8660247], 1e-6),
]


@pytest.mark.parametrize(("rewards", "expected", "tolerance"), TABLE)
def test_table(rewards: list[float], expected: list[float], tolerance: float) -> None:
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert result.tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("rewards", [[1] * 4, [0.3] * 6, [0.7] * 8, [-0.95] * 16])
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float32)
    assert (values - values.mean()).abs().max() < 1e-6
    assert group_advantages(values, torch.full((len(rewards),), 3)).tolist() == [0.0] * len(rewards)


def test_a_group_of_one_has_no_advantage() -> None:
    result = group_advantages(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([4, 9, 9]))
    assert result[0] == 0
    assert torch.isfinite(result).all()


def test_empty_batch() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int32)).shape == (0,)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-40, 20)), min_size=1, max_size=40),
    st.sampled_from([(torch.float32, 1e-4), (torch.float64, 1e-12)]),
)
def test_each_group_alone_gives_the_same(
    responses: list[tuple[int, int]], precision: tuple[torch.dtype, float]
) -> None:
    """Members count by id wherever they stand, and no group touches another."""
    dtype, tolerance = precision
    groups = torch.tensor([group for group, _ in responses], dtype=torch.int32)
    rewards = torch.tensor([reward / 20 for _, reward in responses], dtype=dtype)
    advantages = group_advantages(rewards, groups)
    for group in set(groups.tolist()):
        own = rewards[groups == group]
        mixed = bool((own != own[0]).any())
        expected = (own - own.mean()) / (own.std() + 1e-6) if mixed else torch.zeros_like(own)
        torch.testing.assert_close(advantages[groups == group], expected, rtol=0, atol=tolerance)
