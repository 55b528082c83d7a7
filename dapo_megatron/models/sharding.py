"""Shards of Megatron parameters, from Hugging Face tensors and back, as the rules say. Exact in both directions."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dapo_megatron.models.rules import Rule


class Reader(Protocol):
    """Reads named tensors of a checkpoint, whole or in part."""

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor, or its stretch [start, stop) along `dim`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""


def load_shard(rule: Rule, read: Reader, names: Sequence[str], rank: int, size: int) -> Tensor:
    """The shard of `rank` among `size`. Of each tensor one stretch is read, and nothing that the shard does not hold.

    Args:
        rule: the parameter's.
        read: where the Hugging Face tensors are.
        names: their names, in the rule's order.
        rank: which shard.
        size: of how many.
    """
    if not rule.split:
        return read(names[0])
    pieces = rule.pieces(rank, size)
    bounds = [
        (min(piece.start for piece in pieces if piece.source == i), max(p.stop for p in pieces if p.source == i))
        for i in range(len(names))
    ]
    parts = [read(name, rule.dim, *bound) for name, bound in zip(names, bounds, strict=True)]
    shard = assemble(rule, [
        parts[piece.source].narrow(rule.dim, piece.start - bounds[piece.source][0], piece.stop - piece.start)
        for piece in pieces
    ])  # fmt: skip
    missing = rule.shard_shape(size)[rule.dim] - shard.shape[rule.dim]
    if missing:
        shape = list(shard.shape)
        shape[rule.dim] = missing
        shard = torch.cat([shard, shard.new_zeros(shape)], rule.dim)
    return shard


def assemble(rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other along the rule's dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), rule.dim)


def merge_shards(rule: Rule, shards: Sequence[Tensor]) -> list[Tensor]:
    """The Hugging Face tensors, in the rule's order, from all shards in rank order; padding is left out.

    Views of a single shard, where they are stretches of it.
    """
    if not rule.split:
        return [shards[0]]
    if len(shards) == 1 and len(pieces := rule.pieces(0, 1)) == len(rule.hf_shapes):
        return list(shards[0].split([piece.stop - piece.start for piece in pieces], rule.dim))
    tensors = [shards[0].new_empty(shape) for shape in rule.hf_shapes]
    for rank, shard in enumerate(shards):
        start = 0
        for piece in rule.pieces(rank, len(shards)):
            length = piece.stop - piece.start
            part = shard.narrow(rule.dim, start, length)
            tensors[piece.source].narrow(rule.dim, piece.start, length).copy_(part)
            start += length
    return tensors
