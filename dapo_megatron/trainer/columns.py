"""Values of tokens between the ranks that computed them and those that need them.

A column holds one value for each response token of the whole batch, in the order of the header: a model in any layout
can fill it, and one in any other can read it (`Batch.pick`).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.device import current_device
from dapo_megatron.trainer.parallel import Layout


def gather_column(batch: Batch, per_micro_batch: Sequence[Tensor], layout: Layout) -> Tensor:
    """The column of what this model's ranks have for the tokens of their micro-batches, fp32 [T], on every rank.

    A collective over all ranks. Tokens that are in nobody's micro-batch (of filtered responses, or too old) are 0.

    Args:
        batch: packed for the layout.
        per_micro_batch: fp32 [n] each; empty on all but the last pipeline stage.
        layout: that in which they were computed.
    """
    column = torch.zeros(int(batch.header.response_lengths.sum()), device=current_device())
    if layout.tensor_rank == 0:  # tensor-parallel ranks have the same
        for micro, values in zip(batch.micro_batches(), per_micro_batch, strict=True):
            if len(values):
                column[batch.token_index(micro)] = values.float()
    dist.all_reduce(column)
    return column


def response_sums(batch: Batch, per_micro_batch: Sequence[Tensor], layout: Layout) -> Tensor:
    """For each response the sum over its tokens of what the ranks have for them, fp64 [R], on every rank and the CPU.

    A collective over all ranks; arguments as in `gather_column`.
    """
    sums = torch.zeros(batch.header.num_responses, dtype=torch.float64, device=current_device())
    if layout.tensor_rank == 0:
        for micro, values in zip(batch.micro_batches(), per_micro_batch, strict=True):
            if len(values):
                sums.index_add_(0, micro.responses, values.double())
    dist.all_reduce(sums)
    return sums.cpu()
