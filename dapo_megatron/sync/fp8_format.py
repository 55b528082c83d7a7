"""FP8 on the way out: matrices become float8_e4m3fn with a scale for each block of 128 x 128 as they are sent."""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from dapo_megatron.checkpoint.quantize_formats import E4M3_MAX, FP8_BLOCK
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.sync.fp8_plan import original_rows


def quantize_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers and what they are multiplied by, block by block: the largest of a block becomes 448.

    Args:
        matrix: [rows, columns] of any float dtype.

    Returns:
        float8_e4m3fn [rows, columns], and float32 [ceil(rows / 128), ceil(columns / 128)].
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))  # [row blocks, 128, column blocks, 128]
    largest = blocks.abs().amax((1, 3), keepdim=True).float()
    # A block of zeros has the scale 1: it would otherwise be divided by zero.
    scales = torch.where(largest == 0, 1.0, largest / E4M3_MAX)
    numbers = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return numbers[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()


class Source(Protocol):
    """Where the weights come from; `sync.sender.WeightSource`."""

    def gather(self, row: Parameter) -> list[Tensor] | None:
        """The row's whole Hugging Face tensors on the rank that sends it, None elsewhere."""


class Fp8Source:
    """The weights of `source`, those of `matrices` quantised; rows are those of `fp8_plan`."""

    def __init__(self, source: Source, arch: Architecture, matrices: Collection[str]) -> None:
        self._source, self._matrices, self._rows = source, matrices, original_rows(arch)

    def gather(self, row: Parameter) -> list[Tensor] | None:
        """Each of the row's tensors, behind a quantised one its scales; None where the rank does not send it."""
        original = self._rows[row.name]
        tensors = self._source.gather(original)
        if tensors is None:
            return None
        found: list[Tensor] = []
        for name, tensor in zip(original.hf_names, tensors, strict=True):
            found += quantize_blocks(tensor) if name in self._matrices else (tensor,)
        return found
