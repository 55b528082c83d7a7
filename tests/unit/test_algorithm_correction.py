"""Importance weights between trainer and engine: bounds, levels, masks, responses spread over ranks."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from dapo_megatron.algorithm.correction import RolloutCorrection, rollout_correction
from dapo_megatron.algorithm.policy_loss import mean_log_ratios, response_log_ratio_sums
from dapo_megatron.config.algorithm import AlgorithmConfig, CorrectionConfig

RATIOS = [0.25, 0.5, 0.75, 1.0, 2.0, 3.0]

# Three responses, interleaved and of 3, 1 and 2 tokens: products 1.5, 4 and 0.3, geometric means 1.14, 4 and 0.55.
RESPONSES = torch.tensor([7, 3, 7, 5, 5, 7])
TOKEN_RATIOS = [0.5, 4.0, 1.0, 0.2, 1.5, 3.0]
PRODUCTS = {7: 1.5, 3: 4.0, 5: 0.3}
LENGTHS = {7: 3, 3: 1, 5: 2}


def correct(ratios: list[float], responses: Tensor | None = None, **config: Any) -> RolloutCorrection:
    """The correction of unmasked fp64 tokens whose w are given."""
    old = torch.tensor(ratios, dtype=torch.float64).log()
    responses = torch.zeros(len(ratios), dtype=torch.long) if responses is None else responses
    mask = torch.ones(len(ratios), dtype=torch.bool)
    return rollout_correction(old, torch.zeros_like(old), mask, responses, CorrectionConfig(**config))


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"mode": "none"}, [1, 1, 1, 1, 1, 1]),
        ({"mode": "tis"}, [0.25, 0.5, 0.75, 1, 2, 2]),
        ({"mode": "tis", "cap": 2.5, "floor": 0.4}, [0.4, 0.5, 0.75, 1, 2, 2.5]),
        ({"mode": "mis"}, [0, 0.5, 0.75, 1, 2, 0]),
        ({"mode": "mis", "low": 0.6, "high": 4.0}, [0, 0, 0.75, 1, 2, 3]),
    ],
)
def test_weights_of_tokens(config: dict[str, Any], weights: list[float]) -> None:
    """Both bounds of the interval that `mis` keeps are in it."""
    result = correct(RATIOS, **config)
    assert result.weights.tolist() == pytest.approx(weights, abs=1e-12)
    assert result.ratio.tolist() == pytest.approx(RATIOS)


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_what_is_measured_does_not_depend_on_the_mode(mode: str) -> None:
    result = correct(RATIOS, mode=mode, cap=1.5, floor=0.4, low=0.75, high=2.5)
    assert result.truncated.tolist() == [True, False, False, False, True, True]
    assert result.masked.tolist() == [True, True, False, False, False, True]
    assert result.ratio.tolist() == pytest.approx(RATIOS)


@pytest.mark.parametrize("level", ["sequence", "sequence_mean"])
def test_weights_of_responses(level: str) -> None:
    """Every token of a response has the same weight, and all of them are masked together."""
    power = {r: 1.0 if level == "sequence" else 1 / LENGTHS[r] for r in PRODUCTS}
    expected = [PRODUCTS[r] ** power[r] for r in RESPONSES.tolist()]
    truncated = correct(TOKEN_RATIOS, RESPONSES, mode="tis", level=level)
    masked = correct(TOKEN_RATIOS, RESPONSES, mode="mis", level=level)
    assert truncated.weights.tolist() == pytest.approx([min(w, 2.0) for w in expected])
    assert masked.weights.tolist() == pytest.approx([w if 0.5 <= w <= 2 else 0.0 for w in expected])
    assert masked.masked.tolist() == [r == 3 or (r == 5 and level == "sequence") for r in RESPONSES.tolist()]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_masked_tokens_have_no_effect_whatever_they_hold(mode: str, level: str) -> None:
    config = CorrectionConfig(mode=mode, level=level)
    mask = torch.tensor([True, True, False, False, True, True])
    old = torch.tensor(TOKEN_RATIOS, dtype=torch.float64).log()
    spoiled, rollout = torch.where(mask, old, math.nan), torch.where(mask, 0.0, math.inf).double()
    result = rollout_correction(spoiled, rollout, mask, RESPONSES, config)
    only = rollout_correction(old[mask], rollout[mask], mask[mask], RESPONSES[mask], config)
    for name in ("weights", "ratio", "truncated", "masked"):
        found, expected = getattr(result, name), getattr(only, name)
        assert torch.equal(found[mask], expected), name
        assert not found[~mask].any(), name


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_responses_spread_over_ranks(mode: str, level: str) -> None:
    """Each rank adds up its tokens; the sums, once added, give it the weights of the whole."""
    config = CorrectionConfig(mode=mode, level=level)
    old = torch.tensor(TOKEN_RATIOS, dtype=torch.float64).log()
    rollout, mask = torch.zeros_like(old), torch.ones(len(old), dtype=torch.bool)
    whole = rollout_correction(old, rollout, mask, RESPONSES, config)
    parts = [slice(0, 2), slice(2, 6)]
    sums = sum(response_log_ratio_sums(old[p], rollout[p], mask[p], RESPONSES[p], 8) for p in parts)
    lengths = torch.tensor([LENGTHS[r] for r in RESPONSES.tolist()])
    assert isinstance(sums, Tensor)
    mean = sums[RESPONSES] / lengths
    torch.testing.assert_close(mean, mean_log_ratios(old, rollout, mask, RESPONSES), rtol=0, atol=1e-15)
    pieces = [
        rollout_correction(
            old[p],
            rollout[p],
            mask[p],
            RESPONSES[p],
            config,
            sequence_log_ratio=mean[p],
            response_lengths=lengths[p],
        ).weights
        for p in parts
    ]
    torch.testing.assert_close(torch.cat(pieces), whole.weights, rtol=0, atol=1e-15)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_log_ratios_stay_finite(level: str, dtype: torch.dtype) -> None:
    old, responses = torch.tensor([1e4, -1e4], dtype=dtype), torch.tensor([0, 1])
    config = CorrectionConfig(level=level, cap=1e30)
    result = rollout_correction(old, torch.zeros_like(old), torch.tensor([True, True]), responses, config)
    assert result.ratio.dtype == result.weights.dtype == dtype
    assert result.ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_equal_log_probs_weigh_exactly_one_and_nothing_has_a_gradient(level: str) -> None:
    old = torch.randn(6).requires_grad_()
    mask = torch.ones(6, dtype=torch.bool)
    for mode in ("tis", "mis"):
        result = rollout_correction(old, old.detach(), mask, RESPONSES, CorrectionConfig(mode=mode, level=level))
        assert (result.weights == 1).all()
        assert not result.weights.requires_grad
        assert not result.ratio.requires_grad
        assert not (result.truncated | result.masked).any()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_no_tokens(level: str) -> None:
    result = correct([], mode="mis", level=level)
    assert result.weights.tolist() == result.masked.tolist() == []


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "clip"},
        {"level": "batch"},
        {"cap": 0.9},
        {"cap": math.inf},
        {"floor": 0.0},
        {"floor": 1.5},
        {"low": -0.1},
        {"low": 1.1},
        {"high": 0.9},
        {"high": math.nan},
    ],
)
def test_bad_values_name_their_key(values: dict[str, Any]) -> None:
    """A weight of 1, where engine and trainer agree, is always kept as it is."""
    (key,) = values
    with pytest.raises(ValidationError, match=f"1 validation error for CorrectionConfig\n{key}"):
        CorrectionConfig(**values)


@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_log_probs_of_the_engine_cannot_be_corrected(mode: str) -> None:
    with pytest.raises(ValidationError, match=rf"rollout_correction.mode \({mode}\) must be none .*use recompute"):
        AlgorithmConfig(old_log_probs="rollout", rollout_correction=CorrectionConfig(mode=mode))
    assert AlgorithmConfig(old_log_probs="rollout").rollout_correction.mode == "none"
