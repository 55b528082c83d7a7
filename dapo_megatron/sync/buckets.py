"""Buckets as bytes in memory, and the hash that proves that they arrived: the same on both sides of a push."""

import functools
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from dapo_megatron.sync.wire import Bucket, Stretch

WORD = 8  # bytes
BLOCK = 1 << 16  # words that are hashed at a time: few enough for a processor's cache, enough for a GPU
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def views(bucket: Bucket, buffer: Tensor) -> list[tuple[Stretch, Tensor]]:
    """The stretches inside `buffer` (uint8, at least [bucket.nbytes]), each of its own size, without a copy."""
    return [
        (stretch, buffer[start : start + stretch.nbytes].view(getattr(torch, stretch.dtype)).view(stretch.size))
        for stretch, start in zip(bucket.stretches, bucket.offsets, strict=True)
    ]


def hashes(tensors: Sequence[Tensor], backend: str) -> list[int]:
    """The hash, 64 bits, of each tensor's bytes in row-major order; any dtype and strides.

    Buffers of gloo are in host memory, whose hash is XXH3, as fast as memory is read; of those of NCCL nothing but the
    results leaves the GPU. Both sides of a push have the same backend.
    """
    return HASHES[backend](tensors)


def _hashes_on_host(tensors: Sequence[Tensor]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(_bytes(tensor).numpy().data) for tensor in tensors]


def _hashes_on_device(tensors: Sequence[Tensor]) -> list[int]:
    """Those of `_hash`; one transfer from the device for all."""
    return torch.stack([_hash(tensor) for tensor in tensors]).tolist() if tensors else []


HASHES = {"gloo": _hashes_on_host, "nccl": _hashes_on_device}


def _hash(tensor: Tensor) -> Tensor:
    """A hash of the tensor's bytes, int64 [] on its device.

    The sum, modulo 2^64, of the tensor's 64-bit words, each times an odd number that belongs to its place, and of the
    number of bytes times another. An odd factor is invertible modulo 2^64: a word that changes alone always changes
    the sum. Of any other change a share of about 2^-64 goes unseen, if it does not know the factors: this is for
    faults, not for an attacker.
    """
    flat = _bytes(tensor)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    factors = _factors(flat.device)
    nbytes = flat.numel()
    total = factors[0] * nbytes
    whole = nbytes // WORD * WORD
    words = flat[:whole].view(torch.int64)
    scratch = torch.empty(min(BLOCK, len(words)), dtype=torch.int64, device=flat.device)
    for block in words.split(BLOCK):
        products = torch.mul(block, factors[: len(block)], out=scratch[: len(block)])
        total = total * factors[1] + products.sum()  # the powers of an odd number are odd, too
    if whole < nbytes:
        tail = flat.new_zeros(WORD)
        tail[: nbytes - whole] = flat[whole:]
        total = total * factors[1] + tail.view(torch.int64)[0] * factors[2]
    return total


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [nbytes], in row-major order; a copy only if they do not lie so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, int64 [BLOCK], the same on every machine: multiplied and shifted counters."""
    factors = torch.arange(1, BLOCK + 1, dtype=torch.int64) * _GOLDEN
    for shift in (30, 27, 31):
        factors = (factors ^ (factors >> shift)) * _GOLDEN
    return (factors | 1).to(device)


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor of any floating-point dtype has a value that is no number."""
    if tensor.dtype.itemsize == 1:
        return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return bool(tensor.isnan().any())


def fill_nan(tensor: Tensor) -> Tensor:
    """The contiguous tensor, filled with what is no number in any floating-point dtype: bits that are all set."""
    tensor.view(-1).view(torch.uint8).fill_(0xFF)
    return tensor
