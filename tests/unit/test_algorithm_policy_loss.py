"""The clipped objective, its aggregation, and log-probs with temperature."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.log_prob import log_probs_and_entropy
from dapo_megatron.algorithm.policy_loss import PolicyLoss, policy_loss
from dapo_megatron.config.algorithm import ClipConfig

# ratio, advantage, dual clip, loss, gradient with respect to the log-prob
TABLE = [
    (1.5, 1, None, -1.28, 0.0),
    (1.5, -1, None, 1.5, 1.5),
    (0.5, 1, None, -0.5, -0.5),
    (0.5, -1, None, 0.8, 0.0),
    (1.25, 1, None, -1.25, -1.25),
    (20, -1, None, 20, 20.0),
    (20, -1, 10.0, 10, 0.0),
]


def loss_at(ratio: list[float], advantage: list[float], clip: ClipConfig) -> tuple[PolicyLoss, Tensor]:
    """Losses and gradients at the given ratios, float64."""
    log_probs = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    ones = torch.ones(len(ratio), dtype=torch.bool)
    result = policy_loss(
        log_probs, torch.zeros_like(log_probs), torch.tensor(advantage, dtype=torch.float64), ones, clip
    )
    (gradient,) = torch.autograd.grad(result.losses.sum(), log_probs)
    return result, gradient


@pytest.mark.parametrize(("ratio", "advantage", "dual", "loss", "gradient"), TABLE)
def test_table(ratio: float, advantage: float, dual: float | None, loss: float, gradient: float) -> None:
    result, actual = loss_at([ratio], [advantage], ClipConfig(dual=dual))
    assert result.losses.item() == pytest.approx(loss, abs=1e-12)
    assert actual.item() == (0 if gradient == 0 else pytest.approx(gradient, abs=1e-12))


@settings(deadline=None)
@given(
    st.floats(0.01, 60).filter(lambda r: all(abs(r - edge) > 1e-6 for edge in (0.8, 1.28, 10))),
    st.floats(-3, 3),
    st.sampled_from([None, 10.0]),
)
def test_is_the_minimum_of_the_paper(ratio: float, advantage: float, dual: float | None) -> None:
    """With its derivative; the edges themselves are left out, where there is none."""
    result, gradient = loss_at([ratio], [advantage], ClipConfig(dual=dual))
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    if dual is not None and advantage < 0:
        expected = min(expected, -dual * advantage)
    assert result.losses.item() == pytest.approx(expected, abs=1e-9)
    low, high = advantage < 0 and ratio < 0.8, advantage > 0 and ratio > 1.28
    too_bad = dual is not None and advantage < 0 and ratio > dual
    assert (bool(result.clipped_low), bool(result.clipped_high), bool(result.clipped_dual)) == (low, high, too_bad)
    assert gradient.item() == (0 if low or high or too_bad else pytest.approx(-ratio * advantage, abs=1e-9))


def test_indicators_name_the_bound_that_acts() -> None:
    result, _ = loss_at([1.5, 0.5, 20, 1.5, 0.5, 1.0], [1, -1, -1, -1, 1, 1], ClipConfig())
    assert result.clipped_high.tolist() == [True, False, False, False, False, False]
    assert result.clipped_low.tolist() == [False, True, False, False, False, False]
    assert result.clipped_dual.tolist() == [False, False, True, False, False, False]
    assert result.ratio.tolist() == pytest.approx([1.5, 0.5, 20, 1.5, 0.5, 1.0])
    assert not result.ratio.requires_grad


def test_on_policy_start_has_a_ratio_of_exactly_one() -> None:
    log_probs = torch.randn(100).requires_grad_()
    advantages, mask = torch.randn(100), torch.ones(100, dtype=torch.bool)
    result = policy_loss(log_probs, log_probs.detach().clone(), advantages, mask, ClipConfig())
    assert (result.ratio == 1).all()
    assert not (result.clipped_low | result.clipped_high | result.clipped_dual).any()
    (gradient,) = torch.autograd.grad(result.losses.sum(), log_probs)
    torch.testing.assert_close(gradient, -advantages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-1e4, -50.0, 50.0, 1e4])
def test_far_log_ratios_stay_finite(log_ratio: float, dtype: torch.dtype) -> None:
    log_probs = torch.full((2,), log_ratio, dtype=dtype, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -1.0], dtype=dtype), torch.ones(2, dtype=torch.bool)
    result = policy_loss(log_probs, torch.zeros(2, dtype=dtype), advantages, mask, ClipConfig(dual=None))
    (gradient,) = torch.autograd.grad(result.losses.sum(), log_probs)
    assert result.losses.dtype == dtype
    assert result.ratio.tolist() == pytest.approx([math.exp(math.copysign(20, log_ratio))] * 2, rel=1e-5)
    assert gradient.tolist() == [0, 0]
    assert torch.isfinite(result.losses).all()


def test_masked_tokens_have_no_effect_whatever_they_hold() -> None:
    mask = torch.tensor([True, False, True, False])
    log_probs = torch.tensor([-1.0, math.nan, -2.0, math.inf]).requires_grad_()
    advantages = torch.tensor([1.0, math.nan, -1.0, math.inf])
    result = policy_loss(log_probs, torch.tensor([-1.0, -1.0, -9.0, math.nan]), advantages, mask, ClipConfig())
    loss = aggregate(result.losses, mask)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx((-1 + 10) / 2)
    assert gradient.tolist() == [-0.5, 0, 0, 0]
    assert result.losses[~mask].tolist() == result.ratio[~mask].tolist() == [0, 0]
    assert not (result.clipped_low | result.clipped_high | result.clipped_dual)[~mask].any()


def test_every_token_counts_the_same() -> None:
    per_token = torch.tensor([1.0] * 2 + [0.0] * 6)
    everything = torch.ones(8, dtype=torch.bool)
    assert aggregate(per_token, everything).item() == 0.25
    first_only = everything.clone()
    first_only[2:] = False
    assert aggregate(per_token, first_only).item() == 1.0


def test_empty_batches_give_zero() -> None:
    for size in (0, 3):
        per_token = torch.full((size,), math.nan, requires_grad=True)
        assert aggregate(per_token, torch.zeros(size, dtype=torch.bool)).item() == 0
        assert aggregate(per_token, torch.zeros(size, dtype=torch.bool), num_tokens=0).item() == 0


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30), st.data())
def test_parts_add_up_however_the_batch_is_cut(values: list[float], data: st.DataObject) -> None:
    per_token = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, len(values)], strict=True))
    whole = aggregate(per_token, mask)
    parts = sum(aggregate(per_token[a:b], mask[a:b], num_tokens=int(mask.sum())) for a, b in bounds)
    assert isinstance(parts, Tensor)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(parts, per_token)[0], torch.autograd.grad(whole, per_token)[0], rtol=0, atol=1e-12
    )


def test_log_probs_are_those_of_the_sampling_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0]), temperature=0.5)
    assert log_probs.item() == pytest.approx(-0.1429316, abs=1e-7)
    assert entropy.item() == pytest.approx(0.4410574, abs=1e-7)
    uniform, entropy = log_probs_and_entropy(torch.zeros(5, 8), torch.arange(5), temperature=3.0)
    assert uniform.tolist() == pytest.approx([-math.log(8)] * 5)
    assert entropy.tolist() == pytest.approx([math.log(8)] * 5)
