"""The clipped objective on ratios of tokens and of responses, its clip range, and log-probs with temperature."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.log_prob import log_probs_and_entropy
from dapo_megatron.algorithm.policy_loss import PolicyLoss, clip_range, policy_loss, response_log_ratio_sums
from dapo_megatron.config.algorithm import AlgorithmConfig, ClipConfig, ClipWarmupConfig

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

GSPO = AlgorithmConfig(loss="gspo", clip=ClipConfig(low=0.2, high=0.28, dual=None))
CISPO = AlgorithmConfig(loss="cispo", clip=ClipConfig(low=0.2, high=0.28, dual=None))


def one_response(tokens: int) -> tuple[Tensor, Tensor]:
    """Mask and response ids of a response without masked tokens."""
    return torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.long)


def loss_at(
    ratio: list[float], advantage: list[float], clip: ClipConfig, loss: str = "ppo_clip"
) -> tuple[PolicyLoss, Tensor]:
    """Losses and gradients at the given ratios, float64."""
    log_probs = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    old, advantages = torch.zeros_like(log_probs), torch.tensor(advantage, dtype=torch.float64)
    result = policy_loss(log_probs, old, advantages, *one_response(len(ratio)), AlgorithmConfig(loss=loss, clip=clip))
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


@settings(deadline=None)
@given(
    st.floats(0.01, 60).filter(lambda r: all(abs(r - edge) > 1e-6 for edge in (0.72, 1.28, 10))),
    st.floats(-3, 3),
    st.sampled_from([None, 10.0]),
)
def test_by_sign_mirrors_the_interval_of_a_negative_advantage(
    ratio: float, advantage: float, dual: float | None
) -> None:
    result, gradient = loss_at([ratio], [advantage], ClipConfig(dual=dual, by_sign=True))
    low, high = (0.8, 1.28) if advantage > 0 else (0.72, 1.2)
    expected = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if dual is not None and advantage < 0:
        expected = min(expected, -dual * advantage)
    assert result.losses.item() == pytest.approx(expected, abs=1e-9)
    assert bool(result.clipped_low) == (advantage < 0 and ratio < 0.72)
    assert bool(result.clipped_high) == (advantage > 0 and ratio > 1.28)
    flat = bool(result.clipped_low | result.clipped_high | result.clipped_dual)
    assert gradient.item() == (0 if flat else pytest.approx(-ratio * advantage, abs=1e-9))


@pytest.mark.parametrize("low", [0.2, 1.0])
def test_cispo_weights_every_log_prob_by_its_clipped_ratio(low: float) -> None:
    """Both ends act on both signs, and no token loses its gradient; low 1 leaves no lower end."""
    ratio, advantage = [1.5, 1.5, 0.5, 0.5, 1.1, 9e8, 1e-12, 2.0], [1.0, -1.0, 1.0, -2.0, 3.0, -1.0, 1.0, 0.0]
    result, gradient = loss_at(ratio, advantage, ClipConfig(low=low, dual=None), "cispo")
    weights = [min(max(r, 1 - low, math.exp(-20)), 1.28) for r in ratio]
    expected = [-w * a for w, a in zip(weights, advantage, strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert result.losses.tolist() == pytest.approx([g * math.log(r) for g, r in zip(expected, ratio, strict=True)])
    assert result.clipped_low.tolist() == [low < 1 and r < 0.8 for r in ratio]
    assert result.clipped_high.tolist() == [r > 1.28 and a != 0 for r, a in zip(ratio, advantage, strict=True)]
    assert not result.clipped_dual.any()


def test_clip_range_waits_and_then_goes_to_its_targets() -> None:
    """From (0.1, 0.25) to (0.05, 0.35) in 5 steps, after 2 with the start values."""
    clip = ClipConfig(low=0.05, high=0.35, warmup=ClipWarmupConfig(delay=2, steps=5, low=0.1, high=0.25))
    lows, highs = zip(*(clip_range(clip, step) for step in range(9)), strict=True)
    assert lows == pytest.approx([0.1, 0.1, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.05])
    assert highs == pytest.approx([0.25, 0.25, 0.25, 0.27, 0.29, 0.31, 0.33, 0.35, 0.35])
    assert clip_range(clip, 7) == (0.05, 0.35)  # exactly
    assert clip_range(ClipConfig(), 1) == (0.2, 0.28)


def test_clip_range_without_delay_moves_in_the_first_step() -> None:
    clip = ClipConfig(low=0.2, high=0.4, warmup=ClipWarmupConfig(steps=2, low=0.1, high=0.2))
    assert [clip_range(clip, step) for step in (1, 2)] == [pytest.approx((0.15, 0.3)), (0.2, 0.4)]


@pytest.mark.parametrize("config", [AlgorithmConfig(), GSPO, CISPO], ids=["ppo_clip", "gspo", "cispo"])
def test_on_policy_start_has_a_ratio_of_exactly_one(config: AlgorithmConfig) -> None:
    log_probs, advantages = torch.randn(100).requires_grad_(), torch.randn(100)
    result = policy_loss(log_probs, log_probs.detach().clone(), advantages, *one_response(100), config)
    assert (result.ratio == 1).all()
    assert not (result.clipped_low | result.clipped_high | result.clipped_dual).any()
    (gradient,) = torch.autograd.grad(result.losses.sum(), log_probs)
    torch.testing.assert_close(gradient, -advantages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-1e4, -50.0, 50.0, 1e4])
def test_far_log_ratios_stay_finite(log_ratio: float, dtype: torch.dtype) -> None:
    log_probs = torch.full((2,), log_ratio, dtype=dtype, requires_grad=True)
    old, advantages = torch.zeros(2, dtype=dtype), torch.tensor([1.0, -1.0], dtype=dtype)
    config = AlgorithmConfig(clip=ClipConfig(dual=None))
    result = policy_loss(log_probs, old, advantages, *one_response(2), config)
    (gradient,) = torch.autograd.grad(result.losses.sum(), log_probs)
    assert result.losses.dtype == dtype
    assert result.ratio.tolist() == pytest.approx([math.exp(math.copysign(20, log_ratio))] * 2, rel=1e-5)
    assert gradient.tolist() == [0, 0]
    assert torch.isfinite(result.losses).all()


@pytest.mark.parametrize(
    ("config", "expected"), [(AlgorithmConfig(), (-1 + 10) / 2), (CISPO, (1 - 1.28 * 2) / 2)], ids=["ppo_clip", "cispo"]
)
def test_masked_tokens_have_no_effect_whatever_they_hold(config: AlgorithmConfig, expected: float) -> None:
    mask, responses = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 0, -7])
    log_probs = torch.tensor([-1.0, math.nan, -2.0, math.inf]).requires_grad_()
    old, advantages = torch.tensor([-1.0, -1.0, -9.0, math.nan]), torch.tensor([1.0, math.nan, -1.0, math.inf])
    result = policy_loss(log_probs, old, advantages, mask, responses, config)
    loss = aggregate(result.losses, mask, responses)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(expected)
    assert gradient.tolist() == pytest.approx([-0.5, 0, 0.64 if config is CISPO else 0, 0])
    assert result.losses[~mask].tolist() == result.ratio[~mask].tolist() == [0, 0]
    assert not (result.clipped_low | result.clipped_high | result.clipped_dual)[~mask].any()


# Four responses, interleaved and of 3, 2, 4 and 1 tokens, at log-ratios such that the second is clipped above and
# the third below.
RESPONSES = torch.tensor([9, 4, 9, 6, 4, 6, 2, 6, 9, 6])
OLD = torch.tensor([-1.2, -0.3, -2.0, -0.7, -1.1, -0.4, -0.9, -1.6, -0.2, -2.2], dtype=torch.float64)
LOG_RATIO = torch.tensor([0.3, 0.1, -0.4, -0.2, 0.5, -0.1, 0.02, -0.3, 0.12, -0.4], dtype=torch.float64)
ADVANTAGE_OF = {9: 0.7, 4: 1.3, 6: -0.6, 2: -1.1}
ADVANTAGES = torch.tensor([ADVANTAGE_OF[r] for r in RESPONSES.tolist()], dtype=torch.float64)
ALL = torch.ones(len(RESPONSES), dtype=torch.bool)


def gspo_objective(log_probs: Tensor, clip: ClipConfig) -> Tensor:
    """Minus eq. 5 of arXiv 2507.18071, written out: the mean over responses of -min(s A, clip(s) A)."""
    terms = []
    for response, advantage in ADVANTAGE_OF.items():
        chosen = response == RESPONSES
        s = (log_probs[chosen] - OLD[chosen]).mean().exp()
        terms.append(torch.minimum(s * advantage, s.clamp(1 - clip.low, 1 + clip.high) * advantage))
    return -torch.stack(terms).mean()


def test_gspo_is_the_objective_of_sequences_with_its_gradient() -> None:
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    result = policy_loss(log_probs, OLD, ADVANTAGES, ALL, RESPONSES, GSPO)
    loss, expected = aggregate(result.losses, ALL, RESPONSES, "sequence_mean"), gspo_objective(log_probs, GSPO.clip)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-15)
    gradients = [torch.autograd.grad(value, log_probs)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)
    assert (gradients[0] != 0).tolist() == [response in (9, 2) for response in RESPONSES.tolist()]
    assert result.clipped_high.tolist() == [response == 4 for response in RESPONSES.tolist()]
    assert result.clipped_low.tolist() == [response == 6 for response in RESPONSES.tolist()]
    for response in ADVANTAGE_OF:
        chosen = torch.eq(RESPONSES, response)
        assert result.ratio[chosen].tolist() == pytest.approx([LOG_RATIO[chosen].mean().exp().item()] * chosen.sum())


def test_gspo_gradient_by_finite_differences() -> None:
    def loss(log_probs: Tensor) -> Tensor:
        result = policy_loss(log_probs, OLD, ADVANTAGES, ALL, RESPONSES, GSPO)
        return aggregate(result.losses, ALL, RESPONSES, "sequence_mean")

    assert torch.autograd.gradcheck(loss, (OLD + LOG_RATIO).requires_grad_(), atol=1e-9)


def test_gspo_of_a_response_without_its_masked_tokens() -> None:
    """They are in neither its ratio nor its length, and what they hold does not matter."""
    mask = ALL.clone()
    mask[[2, 7, 8]] = False
    spoiled = torch.where(mask, OLD + LOG_RATIO, math.nan).requires_grad_()
    result = policy_loss(spoiled, OLD, torch.where(mask, ADVANTAGES, math.inf), mask, RESPONSES, GSPO)
    (gradient,) = torch.autograd.grad(aggregate(result.losses, mask, RESPONSES, "sequence_mean"), spoiled)
    alone = (OLD + LOG_RATIO)[mask].requires_grad_()
    only = policy_loss(alone, OLD[mask], ADVANTAGES[mask], ALL[mask], RESPONSES[mask], GSPO)
    (expected,) = torch.autograd.grad(aggregate(only.losses, ALL[mask], RESPONSES[mask], "sequence_mean"), alone)
    torch.testing.assert_close(result.losses[mask], only.losses)
    torch.testing.assert_close(gradient[mask], expected)
    assert result.losses[~mask].tolist() == gradient[~mask].tolist() == [0, 0, 0]


def test_gspo_of_responses_spread_over_ranks() -> None:
    """Ranks hold parts of the same responses; their sums of log-ratios are added."""
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    whole = policy_loss(log_probs, OLD, ADVANTAGES, ALL, RESPONSES, GSPO)
    parts = [slice(0, 4), slice(4, 10)]
    sums = sum(response_log_ratio_sums(log_probs[p], OLD[p], ALL[p], RESPONSES[p], 10) for p in parts)
    assert isinstance(sums, Tensor)
    assert not sums.requires_grad
    mean = (sums / RESPONSES.bincount(minlength=10))[RESPONSES]
    losses = [
        policy_loss(log_probs[p], OLD[p], ADVANTAGES[p], ALL[p], RESPONSES[p], GSPO, sequence_log_ratio=mean[p]).losses
        for p in parts
    ]
    torch.testing.assert_close(torch.cat(losses), whole.losses, rtol=0, atol=1e-15)
    gradients = [torch.autograd.grad(value.sum(), log_probs)[0] for value in (torch.cat(losses), whole.losses)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


def test_gspo_dual_clip_bounds_the_ratio_of_the_response() -> None:
    """Token ratios of 1 and 400: the response's is 20, above the bound of 10 where A < 0."""
    log_probs = torch.tensor([0.0, math.log(400)], dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    for dual, loss, gradient in ((10.0, 10, 0), (None, 20, 20)):
        config = AlgorithmConfig(loss="gspo", clip=ClipConfig(dual=dual))
        result = policy_loss(log_probs, torch.zeros_like(log_probs), advantages, *one_response(2), config)
        assert result.losses.tolist() == pytest.approx([loss] * 2)
        assert result.clipped_dual.tolist() == [dual is not None] * 2
        assert torch.autograd.grad(result.losses.sum(), log_probs)[0].tolist() == pytest.approx([gradient] * 2)


def test_log_probs_are_those_of_the_sampling_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0]), temperature=0.5)
    assert log_probs.item() == pytest.approx(-0.1429316, abs=1e-7)
    assert entropy.item() == pytest.approx(0.4410574, abs=1e-7)
    uniform, entropy = log_probs_and_entropy(torch.zeros(5, 8), torch.arange(5), temperature=3.0)
    assert uniform.tolist() == pytest.approx([-math.log(8)] * 5)
    assert entropy.tolist() == pytest.approx([math.log(8)] * 5)
