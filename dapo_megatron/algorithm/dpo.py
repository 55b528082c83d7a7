"""Direct preference optimisation (arXiv 2305.18290) from the summed log-probs of pairs of responses."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Preferences:
    """P pairs: what the loss is, and its derivative in the form of advantages."""

    advantages: Tensor  # floating [R]
    losses: Tensor  # floating [P]
    margins: Tensor  # floating [P] z, the difference of implicit rewards


def dpo(
    log_prob_sums: Tensor,
    reference_sums: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Preferences:
    """Compute L = -(1 - e) log sigmoid(z) - e log sigmoid(-z) of each pair (eq. 7, with smoothed labels).

        z = beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)),

    each log-prob summed over the tokens of its response. The mean of L over pairs has the gradient of the mean over
    all 2 P responses of -A sum(log pi), with the constants

        A(chosen) = -A(rejected) = 2 beta ((1 - e) sigmoid(-z) - e sigmoid(z)).

    So a pair's responses may lie in different micro-batches and on different ranks.

    Args:
        log_prob_sums: floating [R], of the policy being trained.
        reference_sums: floating [R], of the frozen reference policy.
        chosen: int64 [P], the better response of each pair.
        rejected: int64 [P], the worse.
        beta: see above.
        label_smoothing: e, the share of pairs taken to be labelled the wrong way round.
    """
    rewards = beta * (log_prob_sums - reference_sums)
    z = rewards[chosen] - rewards[rejected]
    strength = 2 * beta * ((1 - label_smoothing) * torch.sigmoid(-z) - label_smoothing * torch.sigmoid(z))
    advantages = torch.zeros_like(rewards).index_add(0, chosen, strength).index_add(0, rejected, -strength)
    losses = -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)
    return Preferences(advantages, losses, z)
