"""Importance weights for tokens that an inference engine sampled with other numerics than the trainer's."""

from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

import torch
from torch import Tensor

from dapo_megatron.algorithm.aggregation import count_tokens
from dapo_megatron.algorithm.policy_loss import MAX_LOG_RATIO, mean_log_ratios

Mode = Literal["none", "tis", "mis"]
Level = Literal["token", "sequence", "sequence_mean"]


class CorrectionSettings(Protocol):
    """What the correction reads of its configuration (`dapo_megatron.config.algorithm.CorrectionConfig`)."""

    @property
    def mode(self) -> Mode:
        """What the losses are multiplied with."""

    @property
    def level(self) -> Level:
        """Whose ratio the weight is."""

    @property
    def cap(self) -> float:
        """C of `tis`."""

    @property
    def floor(self) -> float | None:
        """Lower bound of `tis`, or None without it."""

    @property
    def low(self) -> float:
        """Least weight that `mis` keeps."""

    @property
    def high(self) -> float:
        """Largest weight that `mis` keeps."""


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights of T tokens, and what is measured in every mode. Masked tokens are 0 or False; nothing has a gradient.

    The means of the last three over tokens are the mean of w and the shares that `tis` and `mis` act on, or would.
    """

    weights: Tensor  # floating [T] factor of each token's loss; 1 with the mode `none`
    ratio: Tensor  # floating [T] w, neither truncated nor masked
    truncated: Tensor  # bool [T] w is above `cap` or below `floor`
    masked: Tensor  # bool [T] w is outside [`low`, `high`]


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    response_ids: Tensor,
    config: CorrectionSettings,
    *,
    sequence_log_ratio: Tensor | None = None,
    response_lengths: Tensor | None = None,
) -> RolloutCorrection:
    """Weigh each token by w = pi_old / pi_rollout, the trainer's probability over the engine's.

        level token          w of the token
              sequence       the product of w over the response's unmasked tokens
              sequence_mean  its geometric mean
        mode  none           no weights
              tis            w, at most `cap` and at least `floor` (truncated importance sampling, without the floor:
                             E. Ionides, Journal of Computational and Graphical Statistics 17, 2008)
              mis            w inside [`low`, `high`], bounds included, and 0 outside (masked)

    Losses times `weights` are aggregated over the same number of tokens as without them. log w is clamped to +-20, as
    log r is in `policy_loss`. What stands at masked positions has no effect, even when it is not a number.

    The keyword arguments describe whole responses, of which a context-parallel rank holds parts; what is None is
    computed from the tokens given here. They are not read at the level `token`.

    Args:
        old_log_probs: floating [T], under the policy at the start of the step, by the trainer.
        rollout_log_probs: floating [T], by the engine that sampled the tokens.
        loss_mask: bool [T].
        response_ids: integer [T], the response of each token; any numbers, in any order, unused where masked.
        config: which weights.
        sequence_log_ratio: floating [T], for each token the mean of log w over its response's unmasked tokens.
        response_lengths: integer [T], for each token the unmasked tokens of its response.
    """
    log_weight = old_log_probs.detach() - rollout_log_probs
    if config.level != "token":
        if sequence_log_ratio is None:
            sequence_log_ratio = mean_log_ratios(old_log_probs, rollout_log_probs, loss_mask, response_ids)
        if response_lengths is None:
            response_lengths = count_tokens(loss_mask, response_ids)
        factor = response_lengths if config.level == "sequence" else 1
        log_weight = (sequence_log_ratio * factor).to(log_weight.dtype)
    ratio = torch.where(loss_mask, log_weight, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    masked = (ratio < config.low) | (ratio > config.high)
    bounded = ratio.clamp(min=config.floor, max=config.cap)
    if config.mode == "none":
        weights = torch.ones_like(ratio)
    elif config.mode == "tis":
        weights = bounded
    elif config.mode == "mis":
        weights = torch.where(masked, 0.0, ratio)
    else:
        assert_never(config.mode)
    return RolloutCorrection(
        weights=torch.where(loss_mask, weights, 0.0),
        ratio=torch.where(loss_mask, ratio, 0.0),
        truncated=loss_mask & (bounded != ratio),
        masked=loss_mask & masked,
    )
