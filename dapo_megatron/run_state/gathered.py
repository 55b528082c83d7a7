"""Optimizer states that megatron-core gathers for a save, where it then looks for them.

Gathered, the buckets of a buffer follow each other without the padding between them, but each parameter's states are
cut out at its place in the buffer, which counts the padding. Behind the first padding every state would silently be
that of other parameters: on the last stage where it has a copy of tied embeddings, which are a bucket of their own,
and in every model of more than one bucket.
"""

import functools
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@functools.cache  # a second call would spread what is in place
def keep_places() -> None:
    """Make DistributedOptimizer return gathered states with the padding of the buffers. Idempotent."""
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    @functools.wraps(gather)
    def gather_in_place(self: Any, *args: Any, **options: Any) -> Any:
        state = gather(self, *args, **options)
        if state is not None:
            for i, buffer in enumerate(self.buffers):
                for tensors in state[i].values():
                    for key in ("param", "exp_avg", "exp_avg_sq"):
                        tensors[key] = _spread(tensors[key], buffer)
        return state

    DistributedOptimizer.get_parameter_state_dp_zero = gather_in_place


def _spread(gathered: Tensor, buffer: Any) -> Tensor:
    """Buckets one after the other [sum of their sizes] -> each at its place in the buffer [its size]."""
    if len(buffer.buckets) == 1:
        return gathered
    whole = torch.zeros(buffer.numel, dtype=gathered.dtype)
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    for bucket, part in zip(buffer.buckets, gathered.split(sizes), strict=True):
        whole[bucket.offset : bucket.offset + len(part)] = part
    return whole
