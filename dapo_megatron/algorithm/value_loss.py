"""The clipped loss of a critic's values, per token."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute l = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) for every token.

    PPO's implementations have this loss (arXiv 2006.05990, "PPO-style value loss clipping"), its paper the one without
    the clip (arXiv 1707.06347, eq. 9). The gradient with respect to `values` is V - R, and 0 where the clip acts: where
    V has moved further than c from V_old and is nearer to R than the limit is.

    Args:
        values: V, floating [T].
        old_values: V_old, those at the start of the step, [T].
        returns: R, what the values are to predict, [T].
        loss_mask: bool [T]. What stands at masked positions has no effect, even when it is not a number.
        clip: c, in units of the reward; None for 1/2 (V - R)^2.

    Returns:
        losses, floating [T], and whether the clip acted, bool [T]; 0 and False where masked.
    """
    # Masked first: 0 x nan in a backward pass would be nan.
    values, old_values, returns = (torch.where(loss_mask, x, 0.0) for x in (values, old_values, returns))
    losses = (values - returns).square() / 2
    if clip is None:
        return losses, torch.zeros_like(loss_mask)
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held = (near - returns).square() / 2
    clipped = held > losses
    return torch.where(clipped, held, losses), clipped
