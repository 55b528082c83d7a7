"""Two checkpoints, in whatever formats and layouts, tensor by tensor; and whether one is what its manifest says."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from dapo_megatron.checkpoint import is_megatron
from dapo_megatron.checkpoint.manifest import read_manifest, record, verify_tensors
from dapo_megatron.checkpoint.megatron import CRITIC, MegatronCheckpoint
from dapo_megatron.checkpoint.source import COMPUTED, MegatronSource
from dapo_megatron.checkpoint.weights import WeightReader, open_weights
from dapo_megatron.models.sharding import merge_shards


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints in one tensor.

    `what` is "", or says that the tensor is missing in one, or has another shape or dtype. `largest` is the largest
    absolute difference of values, None where they cannot be compared; `digests` are the first SHA-256 digits of both.
    """

    name: str
    what: str
    largest: float | None
    digests: tuple[str, str]


def differences(a: Path, b: Path) -> Iterator[Difference]:
    """Every tensor whose bytes differ, in the order of `a`. Holds two tensors at a time.

    Raises:
        UserError: if one is not a checkpoint, or is damaged.
    """
    ours, theirs = open_weights(a), open_weights(b)
    theirs_too = set(theirs.names())
    both = theirs_too.intersection(ours.names())
    for name in _names(ours, theirs):
        if name not in both:
            yield Difference(name, f"only in {b if name in theirs_too else a}", None, ("", ""))
            continue
        left, right = ours(name), theirs(name)
        records = record(left), record(right)
        if records[0] != records[1]:
            digests = records[0].sha256[:12], records[1].sha256[:12]
            if records[0].shape != records[1].shape:
                yield Difference(name, f"{records[0].shape} and {records[1].shape}", None, digests)
            else:
                kinds = (records[0].dtype, records[1].dtype)
                what = "" if kinds[0] == kinds[1] else f"{kinds[0]} and {kinds[1]}"
                yield Difference(name, what, _largest(left, right), digests)


def _names(ours: WeightReader, theirs: WeightReader) -> list[str]:
    """Names of the tensors in either, but for those that are computed from config.json."""
    names = dict.fromkeys([*ours.names(), *theirs.names()])
    return [name for name in names if not name.endswith(COMPUTED)]


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.to(torch.float64) - b.to(torch.float64)).abs().max()) if a.numel() else 0.0


def _larger(a: float, b: float) -> float:
    """The larger number; NaN where there is one, which `max` would lose."""
    return a if math.isnan(a) or a > b else b


def compare_weights(a: Path, b: Path, console: Console) -> bool:
    """Print what differs; whether nothing does."""
    table = Table(Column("tensor", overflow="fold"), "difference", "largest |a - b|", "SHA-256 of a", "of b")
    count, largest = 0, 0.0
    for difference in differences(a, b):
        count += 1
        largest = _larger(largest, difference.largest or 0.0)
        value = "" if difference.largest is None else f"{difference.largest:.3g}"
        table.add_row(difference.name, difference.what, value, *difference.digests)
    total = len(_names(open_weights(a), open_weights(b)))
    if count:
        console.print(table)
        most = "some by NaN" if math.isnan(largest) else f"by at most {largest:.3g}"
        console.print(f"{count} of {total} tensors differ, {most}", highlight=False)
    else:
        console.print(f"all {total} tensors are equal, byte by byte", highlight=False)
    return not count


def verify_folder(folder: Path) -> int:
    """Read a converted folder again and compare every tensor, optimizer states included, with its manifest.

    Returns:
        How many tensors were compared.

    Raises:
        UserError: naming the first that is not what was written.
    """
    manifest = read_manifest(folder)
    if not is_megatron(folder):
        reader = open_weights(folder)
        expected = manifest.in_files()
        verify_tensors(folder, expected, reader, reader.names())
        return len(expected)
    checkpoint = MegatronCheckpoint(folder)
    compared = _verify_megatron(checkpoint)
    if (folder / CRITIC).is_dir():
        compared += _verify_megatron(MegatronCheckpoint(folder / CRITIC, critic_of=checkpoint.arch))
    return compared


def _verify_megatron(checkpoint: MegatronCheckpoint) -> int:
    expected = read_manifest(checkpoint.folder).tensors
    items = MegatronSource(checkpoint, weights_only=False).items()
    places = {name: (item, i) for item in items for i, name in enumerate(item.tensor_names)}

    def read(name: str) -> Tensor:
        item, i = places[name]
        return merge_shards(item.row.rule, [checkpoint.whole(item.row, item.prefix)])[i]

    verify_tensors(checkpoint.folder, expected, read, places)
    return len(expected)
