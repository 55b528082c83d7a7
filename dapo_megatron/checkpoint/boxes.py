"""Boxes of an array: what two of them share, and whether some fill another."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a chunk and a box share: where it begins `within` the chunk and `at` which index of the box, its shape."""

    within: Shape
    at: Shape
    shape: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place in the box."""
        return slices(self.at, self.shape)


def slices(offset: Shape, shape: Shape) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def shared(chunk: Shape, chunk_shape: Shape, box: Shape, box_shape: Shape) -> Part:
    """What a chunk at index `chunk` and a box at `box` share. They must meet."""
    begin = [max(a, b) for a, b in zip(chunk, box, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(chunk, chunk_shape, box, box_shape, strict=True)]
    return Part(
        tuple(b - a for b, a in zip(begin, chunk, strict=True)),
        tuple(b - a for b, a in zip(begin, box, strict=True)),
        tuple(e - b for e, b in zip(ends, begin, strict=True)),
    )


def covered(parts: Collection[Part], shape: Sequence[int]) -> bool:
    """Whether parts fill a box of `shape`: each cell of the grid that their edges cut it into lies in one."""
    cuts = [
        sorted({0, size, *(part.at[d] for part in parts), *(part.at[d] + part.shape[d] for part in parts)})
        for d, size in enumerate(shape)
    ]
    places = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]
    filled = np.zeros([len(edges) - 1 for edges in cuts], bool)
    for part in parts:
        ends = (a + n for a, n in zip(part.at, part.shape, strict=True))
        filled[tuple(slice(place[a], place[e]) for place, a, e in zip(places, part.at, ends, strict=True))] = True
    return bool(filled.all())
