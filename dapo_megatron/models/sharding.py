"""How Hugging Face tensors become Megatron shards, and back. Every rule is exact and its own inverse.

A rule reads only the part of each source tensor that its shard holds, so that no rank ever has a whole tensor
it does not need.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Reader(Protocol):
    """Reads named tensors of a checkpoint, whole or in part."""

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor, or its stretch [start, stop) along `dim`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""


class ShardRule(ABC):
    """One Megatron parameter's relation to the Hugging Face tensors it is made of."""

    tensor_parallel = True

    @abstractmethod
    def load(self, read: Reader, names: Sequence[str], rank: int, size: int) -> Tensor:
        """The shard of tensor-parallel `rank` of `size`."""

    @abstractmethod
    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors, in the order of `names`, from all shards in rank order."""


@dataclass(frozen=True)
class Replicated(ShardRule):
    """Every rank holds the whole tensor (norms)."""

    tensor_parallel = False

    def load(self, read: Reader, names: Sequence[str], rank: int, size: int) -> Tensor:
        """The whole tensor."""
        return read(names[0])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The tensor of the first shard."""
        return [shards[0]]


@dataclass(frozen=True)
class Split(ShardRule):
    """Equal parts along `dim`: 0 for vocabulary and column-parallel, 1 for row-parallel weights.

    `length` is the whole dimension. Where it does not divide, the last shards are padded with zeros.
    """

    dim: int
    length: int

    def load(self, read: Reader, names: Sequence[str], rank: int, size: int) -> Tensor:
        """[length / size, ...] or [..., length / size], rounded up."""
        part = -(-self.length // size)
        start, stop = min(rank * part, self.length), min((rank + 1) * part, self.length)
        shard = read(names[0], self.dim, start, stop)
        missing = part - (stop - start)
        if missing:
            padding = list(shard.shape)
            padding[self.dim] = missing
            shard = torch.cat([shard, shard.new_zeros(padding)], self.dim)
        return shard

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensor, without padding."""
        whole = shards[0] if len(shards) == 1 else torch.cat(list(shards), self.dim)
        return [whole.narrow(self.dim, 0, self.length)]


@dataclass(frozen=True)
class FusedQKV(ShardRule):
    """q, k, v interleaved per query group: for 4 heads and 2 groups q0 q1 k0 v0 q2 q3 k1 v1.

    Works for weights [rows, hidden] and biases [rows]. A shard holds whole query groups.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of q, k and v in one query group."""
        return self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim, self.head_dim

    def load(self, read: Reader, names: Sequence[str], rank: int, size: int) -> Tensor:
        """This rank's query groups: [(heads + 2 KV heads) / size x head_dim, hidden], without `hidden` for a bias."""
        groups = self.num_kv_heads // size
        parts = []
        for name, rows in zip(names, self._rows, strict=True):
            part = read(name, 0, rank * groups * rows, (rank + 1) * groups * rows)
            parts.append(part.unflatten(0, (groups, rows)))
        return torch.cat(parts, 1).flatten(0, 1)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v."""
        whole = torch.cat(list(shards), 0).unflatten(0, (self.num_kv_heads, sum(self._rows)))
        return [part.flatten(0, 1) for part in whole.split(self._rows, 1)]


@dataclass(frozen=True)
class GateUp(ShardRule):
    """gate_proj and up_proj: each rank holds its rows of the gate, then its rows of up."""

    ffn_size: int

    def load(self, read: Reader, names: Sequence[str], rank: int, size: int) -> Tensor:
        """[2 x ffn_size / size, hidden]."""
        part = self.ffn_size // size
        return torch.cat([read(name, 0, rank * part, (rank + 1) * part) for name in names], 0)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """gate_proj and up_proj."""
        halves = [shard.chunk(2, 0) for shard in shards]
        return [torch.cat([half[i] for half in halves], 0) for i in range(2)]
