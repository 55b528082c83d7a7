"""From losses of tokens to one loss (eq. 12)."""

import torch
from torch import Tensor


def aggregate(per_token: Tensor, loss_mask: Tensor, num_tokens: Tensor | int | None = None) -> Tensor:
    """Average over tokens, each counting the same ("token-level", arXiv 2503.14476, eq. 12): a scalar.

    `per_token` is floating [T], `loss_mask` bool [T]. `num_tokens` is the number of unmasked tokens of the whole
    mini-batch, over every micro-batch and data-parallel rank, so that the parts add up to the mean however the
    mini-batch is cut; None takes the number of unmasked tokens given here. Without any token the result is 0.
    """
    total = torch.where(loss_mask, per_token, 0.0).sum()
    count = torch.as_tensor(loss_mask.sum() if num_tokens is None else num_tokens, device=total.device)
    return total / count.clamp(min=1)
