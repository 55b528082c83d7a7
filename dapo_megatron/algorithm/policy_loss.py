"""The clipped policy objective, per token: ratios of tokens (eq. 8 and 10), of whole responses (GSPO), or as weights
of the log-probs (CISPO)."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dapo_megatron.algorithm.aggregation import count_tokens

MAX_LOG_RATIO = 20.0
"""log r is clamped to +-20 before exp: beyond it a ratio says nothing and would overflow."""


class ClipRange(Protocol):
    """The part of the clip configuration that the loss reads (`dapo_megatron.config.algorithm.ClipConfig`)."""

    @property
    def low(self) -> float:
        """eps_low."""

    @property
    def high(self) -> float:
        """eps_high."""

    @property
    def dual(self) -> float | None:
        """Dual-clip constant c, or None without it."""

    @property
    def by_sign(self) -> bool:
        """Whether the interval is mirrored where A < 0."""


class ClipWarmup(Protocol):
    """Where the clip range starts and how it moves (`config.algorithm.ClipWarmupConfig`)."""

    @property
    def delay(self) -> int:
        """Rollout steps with the start values."""

    @property
    def steps(self) -> int:
        """Rollout steps from the start values to the targets."""

    @property
    def low(self) -> float:
        """eps_low at the start."""

    @property
    def high(self) -> float:
        """eps_high at the start."""


class ClipSchedule(Protocol):
    """The part of the clip configuration that `clip_range` reads (`config.algorithm.ClipConfig`)."""

    @property
    def low(self) -> float:
        """eps_low once the warm-up is over."""

    @property
    def high(self) -> float:
        """eps_high once the warm-up is over."""

    @property
    def warmup(self) -> ClipWarmup | None:
        """What comes before, or None where the targets hold from the start."""


class LossConfig(Protocol):
    """The part of the algorithm's configuration that the loss reads (`config.algorithm.AlgorithmConfig`)."""

    @property
    def loss(self) -> Literal["ppo_clip", "gspo", "cispo", "dpo"]:
        """The objective: which probability ratio is clipped, and what the clipping does."""

    @property
    def clip(self) -> ClipRange:
        """Where it is clipped."""


@dataclass(frozen=True)
class PolicyLoss:
    """Losses of T tokens and what happened to each. Masked tokens are 0 or False; only `losses` carries a gradient.

    r is the ratio that was clipped: the token's own, or with `gspo` its response's.
    """

    losses: Tensor  # floating [T]
    ratio: Tensor  # floating [T] r = pi_theta / pi_old
    clipped_low: Tensor  # bool [T] r below the interval and A < 0 (cispo: A not 0)
    clipped_high: Tensor  # bool [T] r above the interval and A > 0 (cispo: A not 0)
    clipped_dual: Tensor  # bool [T] A < 0 and r > c


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    response_ids: Tensor,
    config: LossConfig,
    *,
    sequence_log_ratio: Tensor | None = None,
) -> PolicyLoss:
    """Compute l = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) for every token.

    With `ppo_clip`, r is the token's probability ratio (arXiv 2503.14476, eq. 8 and 10). With `gspo` it is the
    response's, exp(mean of log r over its unmasked tokens), in the form that gives each token the gradient of the
    whole response (arXiv 2507.18071, eq. 13 and 14, GSPO-token): averaged by `sequence_mean` this is GSPO's
    objective and its gradient (eq. 5).

    With a dual clip c, l is at most -c A where A < 0 (arXiv 1912.09729, eq. 8). GSPO's paper has none; here the
    same rule holds for the response's ratio, and c = None gives the paper's objective. With `by_sign` the interval is
    [1 - eps_high, 1 + eps_low] where A < 0; of it only the lower end can act.

    The gradient with respect to `log_probs` is -r A, and exactly 0 where a clip acts or |log r| > 20.

    With `cispo`, l = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi of the token (arXiv 2506.13585, eq. 4 and 5):
    no token loses its gradient, -clip(r) A. eps_low = 1 leaves r without a lower bound. `dual` and `by_sign` are not
    read.

    With `dpo`, l = -A log pi, where A is the derivative of the preference loss (`dapo_megatron.algorithm.dpo`).
    Nothing is clipped.

    What stands at masked positions has no effect, even when it is not a number.

    Args:
        log_probs: floating [T], of the policy being trained.
        old_log_probs: floating [T].
        advantages: floating [T].
        loss_mask: bool [T].
        response_ids: integer [T], the response of each token; any numbers, in any order, unused where masked.
        config: which objective, and where the ratio is clipped.
        sequence_log_ratio: floating [T], `gspo` only: for each token the mean of log r over all unmasked tokens of
            its response, detached; needed where a response is spread over ranks. None: over the tokens given here.
    """
    if config.loss == "gspo":
        if sequence_log_ratio is None:
            sequence_log_ratio = mean_log_ratios(log_probs, old_log_probs, loss_mask, response_ids)
        # The value is the response's and the derivative by the token's log-prob is 1: the difference is always 0.
        log_ratio = sequence_log_ratio.to(log_probs.dtype) + (log_probs - log_probs.detach())
    else:
        log_ratio = log_probs - old_log_probs
    log_ratio, advantages = torch.where(loss_mask, log_ratio, 0.0), torch.where(loss_mask, advantages, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.loss == "dpo":
        never = torch.zeros_like(loss_mask)
        losses = -advantages * torch.where(loss_mask, log_probs, 0.0)
        return PolicyLoss(losses, torch.where(loss_mask, ratio.detach(), 0.0), never, never, never)
    if config.loss == "cispo":
        return _cispo(torch.where(loss_mask, log_probs, 0.0), ratio.detach(), advantages, loss_mask, config.clip)
    return _clipped(ratio, advantages, loss_mask, config.clip)


def clip_range(clip: ClipSchedule, step: int) -> tuple[float, float]:
    """(eps_low, eps_high) in rollout step `step`, the first being 1.

    Steps 1 to `delay` have the start values; step `delay` + k is k / `steps` of the way to the targets, linearly,
    which hold from step `delay` + `steps` on.
    """
    warmup = clip.warmup
    if warmup is None or step >= warmup.delay + warmup.steps:
        return clip.low, clip.high
    done = max(0, step - warmup.delay) / warmup.steps
    return warmup.low + done * (clip.low - warmup.low), warmup.high + done * (clip.high - warmup.high)


def _clipped(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, clip: ClipRange) -> PolicyLoss:
    """The pessimistic minimum; masked advantages are 0."""
    lowest = 1 - (clip.high if clip.by_sign else clip.low)
    # The minimum bounds r on one side only, which side depends on the sign of A. Written like this the gradient
    # is that of `clamp`, with no tie between the two arguments of the minimum.
    bounded = torch.where(advantages > 0, ratio.clamp(max=1 + clip.high), ratio.clamp(min=lowest, max=clip.dual))
    negative, detached = advantages < 0, ratio.detach()
    return PolicyLoss(
        losses=-bounded * advantages,
        ratio=torch.where(loss_mask, detached, 0.0),
        clipped_low=negative & (detached < lowest),
        clipped_high=(advantages > 0) & (detached > 1 + clip.high),
        clipped_dual=torch.zeros_like(negative) if clip.dual is None else negative & (detached > clip.dual),
    )


def _cispo(log_probs: Tensor, ratio: Tensor, advantages: Tensor, loss_mask: Tensor, clip: ClipRange) -> PolicyLoss:
    """Log-probs weighted by the clipped, detached ratio; masked log-probs and advantages are 0."""
    signal = advantages != 0
    return PolicyLoss(
        losses=-ratio.clamp(1 - clip.low, 1 + clip.high) * advantages * log_probs,
        ratio=torch.where(loss_mask, ratio, 0.0),
        clipped_low=signal & (ratio < 1 - clip.low),
        clipped_high=signal & (ratio > 1 + clip.high),
        clipped_dual=torch.zeros_like(signal),
    )


def response_log_ratio_sums(
    log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor, response_ids: Tensor, num_responses: int
) -> Tensor:
    """Sum of log r over the unmasked tokens of each response, detached, fp64 [num_responses].

    Sums of ranks that hold parts of the same responses may be added; divided by the responses' unmasked tokens and
    indexed by response they are `sequence_log_ratio`. Flat inputs as in `policy_loss`, except that every id, also
    of a masked token, must be at least 0 and less than `num_responses`.
    """
    log_ratio = torch.where(loss_mask, log_probs.detach() - old_log_probs, 0.0).double()
    return log_ratio.new_zeros(num_responses).index_add(0, response_ids, log_ratio)


def mean_log_ratios(log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor, response_ids: Tensor) -> Tensor:
    """For each token the mean of log r over its response's unmasked tokens, all given here, detached, fp64 [T].

    Flat inputs as in `policy_loss`; 0 for responses without an unmasked token.
    """
    responses, rows = torch.unique(response_ids, return_inverse=True)
    sums = response_log_ratio_sums(log_probs, old_log_probs, loss_mask, rows, len(responses))
    return sums[rows] / count_tokens(loss_mask, rows).clamp(min=1)
