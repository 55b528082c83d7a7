"""How weights are laid out on the wire: the same arithmetic on both sides of a push."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Every tensor starts at a multiple of this many bytes, so that a slice of the flat buffer can be
# viewed as any dtype without a copy.
ALIGNMENT = 16


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together in one flat uint8 buffer of `nbytes` bytes."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The named tensors inside `buffer` (uint8, at least [nbytes]), without a copy."""
        return [
            (spec.name, buffer[start : start + spec.nbytes].view(spec.dtype).view(spec.shape))
            for spec, start in zip(self.specs, self.offsets, strict=True)
        ]


def pack(specs: Iterable[TensorSpec], limit: int) -> list[Bucket]:
    """Cuts `specs`, in their order, into buckets of at most `limit` bytes.

    A tensor larger than `limit` has a bucket of its own.
    """
    buckets: list[Bucket] = []
    members: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if members and start + spec.nbytes > limit:
            buckets.append(Bucket(tuple(members), tuple(offsets), end))
            members, offsets, start = [], [], 0
        members.append(spec)
        offsets.append(start)
        end = start + spec.nbytes
    if members:
        buckets.append(Bucket(tuple(members), tuple(offsets), end))
    return buckets


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 (hex) of the tensor's bytes in row-major order; any dtype, device and strides."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().data).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`; `getattr(torch, name)` is the way back."""
    return str(dtype).removeprefix("torch.")
