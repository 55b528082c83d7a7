"""Bytes of tensors to and from files, by position: no mapping, no buffer but the tensor's own.

A mapped file counts as resident memory once it is read; `pread` into fresh memory keeps that at one tensor, and needs
no file pointer, so that threads may share a descriptor.
"""

import errno
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.errors import UserError

_LONG = 128 << 10  # bytes of a stretch that is worth a system call of its own
_BLOCK = 8 << 20  # bytes of whole rows read at once where only short stretches of them are wanted


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor of any dtype and rank, as bytes: of a copy only where it is not contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_into(handle: int, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes at `offset`.

    Raises:
        EOFError: if the file ends before.
    """
    while view:
        read = os.preadv(handle, [view], offset)
        if not read:
            raise EOFError(f"it ends at byte {offset}")
        view, offset = view[read:], offset + read


def write_from(handle: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`: one call may write less than it was given."""
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn what a full disk raises while `path` is written into a UserError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"{path} cannot be written, disk full: {error.strerror}") from None
        raise


def read_box(
    handle: int,
    base: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    offset: Sequence[int],
    box: Sequence[int],
    out: Tensor | None = None,
) -> Tensor:
    """A box of a row-major array in a file, contiguous; holds at most `_BLOCK` bytes beside it.

    Args:
        handle: file descriptor.
        base: where the array begins in the file, in bytes.
        dtype: of the array.
        shape: of the array.
        offset: first index of the box in each dimension.
        box: shape of the box. It must lie in the array.
        out: the memory to read into, contiguous and of that dtype and shape; new memory if None.

    Raises:
        EOFError: if the file ends before the box does.
    """
    found = torch.empty(tuple(box), dtype=dtype) if out is None else out
    if not found.numel():
        return found
    cut = max((d for d, (size, part) in enumerate(zip(shape, box, strict=True)) if size != part), default=0)
    below = dtype.itemsize * math.prod(shape[cut + 1 :])
    row, stretch = below * math.prod(shape[cut : cut + 1]), below * math.prod(box[cut : cut + 1])
    inner = max(cut - 1, 0)  # the dimension that counts rows; those before it are gone through one by one
    strides = [dtype.itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    rows = math.prod(box[inner:cut])
    pieces = found.view(-1).view(torch.uint8).view(-1, rows, stretch)
    first = base + sum(start * stride for start, stride in zip(offset, strides, strict=True))
    for piece, index in zip(pieces, itertools.product(*map(range, box[:inner])), strict=True):
        at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        _read_rows(handle, at, row, piece)
    return found


def _read_rows(handle: int, at: int, row: int, out: Tensor) -> None:
    """Fill `out` [rows, stretch], bytes, with stretches that begin at `at` and lie `row` bytes apart."""
    rows, stretch = out.shape
    if rows == 1:
        read_into(handle, as_bytes(out), at)
    elif stretch >= _LONG:
        for i in range(rows):
            read_into(handle, as_bytes(out[i]), at + i * row)
    else:
        many = max(1, _BLOCK // row)
        block = torch.empty(min(many, rows) * row, dtype=torch.uint8)
        for i in range(0, rows, many):
            count = min(many, rows - i)
            wanted = (count - 1) * row + stretch  # what follows the last stretch may lie past the end of the file
            read_into(handle, as_bytes(block[:wanted]), at + i * row)
            out[i : i + count] = block.as_strided((count, stretch), (row, 1))
