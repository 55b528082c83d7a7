"""Group-relative advantages (eq. 9)."""

import torch
from torch import Tensor

from dapo_megatron.algorithm.group_filter import EQUAL_SCORES

STD_EPSILON = 1e-6
"""Added to the standard deviation before dividing by it."""


def group_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Normalise each reward within its group: A_i = (R_i - mean) / (std + 1e-6), floating [R].

    `rewards` is floating [R], `group_ids` integer [R]; members are found by id, wherever they stand. `std` is the
    sample standard deviation, divisor G - 1 (arXiv 2503.14476, eq. 9, with the official recipe's divisor). A group
    whose rewards lie within 1e-6 of each other gets exactly 0: rounding in its mean would otherwise be blown up
    by the division.
    """
    members, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)[1:]
    per_group = rewards.new_zeros(len(counts))
    mean = per_group.index_add(0, members, rewards) / counts
    centred = rewards - mean[members]
    variance = per_group.index_add(0, members, centred.square()) / (counts - 1).clamp(min=1)
    spread = per_group.scatter_reduce(0, members, rewards, "amax", include_self=False) - per_group.scatter_reduce(
        0, members, rewards, "amin", include_self=False
    )
    advantages = centred / (variance.sqrt() + STD_EPSILON)[members]
    return torch.where((spread > EQUAL_SCORES)[members], advantages, 0.0)
