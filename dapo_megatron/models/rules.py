"""How Megatron parameters are made of Hugging Face tensors, and how ranks share them: geometry alone, no torch.

A rule knows the tensors that are fused into one parameter, in which order of stretches, and which stretches of the
whole parameter each of `size` ranks holds. Loading, export, checkpoints and transfers are all computed from it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

Shape = tuple[int, ...]
Stretch = tuple[int, int]
"""[start, stop) along a rule's dimension."""


@dataclass(frozen=True)
class Piece:
    """The stretch [start, stop), along the rule's dimension, of the Hugging Face tensor number `source`."""

    source: int
    start: int
    stop: int


class Rule(ABC):
    """One Megatron parameter: Hugging Face tensors, stretch by stretch along `dim`.

    `split`: whether each rank holds a part; otherwise all hold the whole.
    """

    dim: int
    split: ClassVar[bool] = True

    @property
    @abstractmethod
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the Hugging Face tensors."""

    @abstractmethod
    def pieces(self, rank: int, size: int) -> list[Piece]:
        """What the shard of `rank` among `size` consists of, in its order, without padding."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole parameter without padding."""
        first = self.hf_shapes[0]
        return (*first[: self.dim], sum(shape[self.dim] for shape in self.hf_shapes), *first[self.dim + 1 :])

    def padded_shape(self, size: int) -> Shape:
        """Shape of the whole parameter when it is shared by `size` ranks: with zeros at its end where needed."""
        length = self.shape[self.dim]
        return (*self.shape[: self.dim], -(-length // size) * size, *self.shape[self.dim + 1 :])

    def shard_shape(self, size: int) -> Shape:
        """Shape of each rank's shard."""
        if not self.split:
            return self.shape
        padded = self.padded_shape(size)
        return (*padded[: self.dim], padded[self.dim] // size, *padded[self.dim + 1 :])

    def stretches(self, rank: int, size: int) -> list[Stretch]:
        """What the shard of `rank` among `size` consists of, as stretches of the whole, padded parameter."""
        length = self.shard_shape(size)[self.dim]
        return [(rank * length, (rank + 1) * length)]


@dataclass(frozen=True)
class Replicated(Rule):
    """Every rank holds the whole tensor (norms, routers)."""

    whole: Shape
    dim: int = field(default=0, init=False)
    split: ClassVar[bool] = False

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """One tensor."""
        return (self.whole,)

    def padded_shape(self, size: int) -> Shape:
        """Never padded."""
        return self.whole

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """The whole tensor."""
        return [Piece(0, 0, self.whole[0])]

    def stretches(self, rank: int, size: int) -> list[Stretch]:
        """The whole tensor."""
        return [(0, self.whole[0])]


@dataclass(frozen=True)
class Split(Rule):
    """Equal parts along `dim`: 0 for the vocabulary and column-parallel, 1 for row-parallel weights.

    Where the dimension does not divide (only vocabularies may not), the last shards are padded with zeros.
    """

    dim: int
    whole: Shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """One tensor."""
        return (self.whole,)

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """One stretch; an empty one where a shard is padding alone."""
        ((start, stop),) = self.stretches(rank, size)
        length = self.whole[self.dim]
        return [Piece(0, min(start, length), min(stop, length))]


@dataclass(frozen=True)
class FusedQKV(Rule):
    """q, k, v interleaved per query group: for 4 heads and 2 groups q0 q1 k0 v0 q2 q3 k1 v1.

    A shard holds whole query groups. `hidden` is None for biases.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int | None
    dim: int = field(default=0, init=False)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of q, k and v in one query group."""
        return self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim, self.head_dim

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """q, k and v."""
        columns = () if self.hidden is None else (self.hidden,)
        return tuple((self.num_kv_heads * rows, *columns) for rows in self._rows)

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """q, k and v of each of the rank's query groups."""
        groups = self.num_kv_heads // size
        return [
            Piece(source, group * rows, (group + 1) * rows)
            for group in range(rank * groups, (rank + 1) * groups)
            for source, rows in enumerate(self._rows)
        ]


@dataclass(frozen=True)
class GateUp(Rule):
    """The gate's and the up projection: each rank holds its rows of the gate, then its rows of up."""

    ffn_size: int
    hidden: int
    dim: int = field(default=0, init=False)

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Gate and up."""
        return ((self.ffn_size, self.hidden),) * 2

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """The rank's rows of each."""
        part = self.ffn_size // size
        return [Piece(source, rank * part, (rank + 1) * part) for source in range(2)]

    def stretches(self, rank: int, size: int) -> list[Stretch]:
        """The whole is the gate, then up: a shard is two stretches of it."""
        return [(piece.source * self.ffn_size + piece.start, piece.source * self.ffn_size + piece.stop)
                for piece in self.pieces(rank, size)]  # fmt: skip
