"""What travels in a weight push, and in which bytes: the same arithmetic on both sides. The standard library alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

# Every stretch starts at a multiple of this many bytes, so that a part of a flat buffer can be viewed as any dtype.
ALIGNMENT = 16

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class Stretch(NamedTuple):
    """[start, stop) along `dim` of the Hugging Face tensor `name`, which has `shape` and travels as `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.start == 0 and self.stop == self.shape[self.dim]

    @property
    def size(self) -> tuple[int, ...]:
        """Its own shape."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.size) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.start}:{self.stop} of dim {self.dim}]"


class Group(NamedTuple):
    """Who takes part in a broadcast: a trainer rank, and the workers with these numbers of every server."""

    sender: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Stretches that travel in one broadcast of a flat buffer of `nbytes` bytes."""

    group: Group
    stretches: tuple[Stretch, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each stretch begins in the buffer, in bytes."""
        return self._layout[0]

    @cached_property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[tuple[int, ...], int]:
        offsets, end = [], 0
        for stretch in self.stretches:
            offsets.append(aligned(end))
            end = offsets[-1] + stretch.nbytes
        return tuple(offsets), end


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def encode(buckets: Sequence[Bucket]) -> dict[str, Any]:
    """The buckets as JSON values, each group once."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(bucket.group for bucket in buckets))}
    return {
        "groups": [[group.sender, group.workers] for group in groups],
        "buckets": [[groups[bucket.group], [list(stretch) for stretch in bucket.stretches]] for bucket in buckets],
    }


def decode(groups: Iterable[Any], buckets: Iterable[Any]) -> tuple[list[Group], list[Bucket]]:
    """What `encode` was given: its groups in the order of their first buckets, and the buckets."""
    members = [Group(sender, tuple(workers)) for sender, workers in groups]
    return members, [
        Bucket(
            members[number],
            tuple(Stretch(name, dtype, tuple(shape), *place) for name, dtype, shape, *place in stretches),
        )
        for number, stretches in buckets
    ]
