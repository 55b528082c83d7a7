"""The clipped policy objective (eq. 8 and 10), per token."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class PolicyLoss:
    """Losses of T tokens and what happened to each. Masked tokens are 0 or False; only `losses` carries a gradient."""

    losses: Tensor  # floating [T]
    ratio: Tensor  # floating [T] r = pi_theta / pi_old
    clipped_low: Tensor  # bool [T] A < 0 and r < 1 - eps_low
    clipped_high: Tensor  # bool [T] A > 0 and r > 1 + eps_high
    clipped_dual: Tensor  # bool [T] A < 0 and r > c


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, clip: ClipRange
) -> PolicyLoss:
    """Compute l = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) for every token.

    All tensors are flat: `log_probs` (of the policy being trained), `old_log_probs` and `advantages` floating [T],
    `loss_mask` bool [T]. With a dual clip c, l is at most -c A where A < 0. The gradient with respect to
    `log_probs` is -r A, and exactly 0 where a clip acts or |log r| > 20 (arXiv 2503.14476, eq. 8 and 10; dual
    clip: arXiv 1912.09729, eq. 8).

    What stands at masked positions has no effect, even when it is not a number.
    """
    log_ratio = torch.where(loss_mask, log_probs - old_log_probs, 0.0)
    advantages = torch.where(loss_mask, advantages, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # The minimum bounds r on one side only, which side depends on the sign of A. Written like this the gradient
    # is that of `clamp`, with no tie between the two arguments of the minimum.
    bounded = torch.where(advantages > 0, ratio.clamp(max=1 + clip.high), ratio.clamp(min=1 - clip.low, max=clip.dual))
    negative, detached = advantages < 0, ratio.detach()
    return PolicyLoss(
        losses=-bounded * advantages,
        ratio=torch.where(loss_mask, detached, 0.0),
        clipped_low=negative & (detached < 1 - clip.low),
        clipped_high=(advantages > 0) & (detached > 1 + clip.high),
        clipped_dual=torch.zeros_like(negative) if clip.dual is None else negative & (detached > clip.dual),
    )
