"""Megatron checkpoints, written parameter by parameter as the shards of any layout."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoint.distcp import Chunk, DistFile, serialise, write_metadata
from dapo_megatron.checkpoint.journal import Entry
from dapo_megatron.checkpoint.source import Item, Source
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.files import fsync
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.checkpoint_keys import stored_parameter
from dapo_megatron.models.placement import Placement
from dapo_megatron.models.rules import Shape

_OPEN_FILES = 256  # at once: a layout of many ranks has more files than a process may have open


class MegatronWriter:
    """Writes whole parameters as the shards of a layout's ranks, each rank's into files of its own.

    Args:
        folder: where the files go.
        arch: the model.
        parallel: the layout.
        number: of this process: no two append to one file.
    """

    def __init__(self, folder: Path, arch: Architecture, parallel: ParallelConfig, number: int) -> None:
        self.folder, self.arch, self.number = folder, arch, number
        self.placement = Placement(arch, parallel)
        self._files: dict[int, DistFile] = {}
        self._written: dict[Path, None] = {}

    def write(self, item: Item, whole: Tensor) -> list[Chunk]:
        """Write the shards of a parameter; where they are."""
        rule, stored = item.row.rule, stored_parameter(item.row, self.arch)
        shards = self.placement.shards(item.row)
        chunks = []
        for i, rank in enumerate(shards.ranks):
            for start, stop in rule.stretches(i, shards.size):
                part = _stretch(whole, rule.dim, start, stop)
                offset = [0] * part.dim()
                offset[rule.dim] = start
                stacked = part.reshape(*(1 for _ in stored.index), *part.shape)
                chunks.append(self._file(rank).append(item.prefix + stored.key, (*stored.index, *offset), stacked))
        return chunks

    def _file(self, rank: int) -> DistFile:
        if rank not in self._files:
            if len(self._files) == _OPEN_FILES:
                self.close()
            self._files[rank] = DistFile(self.folder, rank, self.number)
            self._written[self._files[rank].path] = None
        return self._files[rank]

    def close(self) -> None:
        """Close all files, without putting them on the disk."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def flush(self) -> None:
        """Put on the disk what was written. Another thread may call this while one writes."""
        for path in list(self._written):
            fsync(path)

    def finish(self, source: Source, entries: Sequence[Entry], common: Mapping[str, Any], objects: list[Chunk]) -> None:
        """Write what makes a folder of chunks a Megatron checkpoint. On one process, when all have flushed.

        Args:
            source: what was written.
            entries: one for each of its items.
            common: what is not sharded.
            objects: sharded objects that lie in the folder's files.
        """
        tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        for item, entry in zip(source.items(), entries, strict=True):
            stored = stored_parameter(item.row, self.arch)
            padded = item.row.rule.padded_shape(self.placement.shards(item.row).size)
            dtype = getattr(torch, next(iter(entry["tensors"].values()))["dtype"])
            tensors[item.prefix + stored.key] = ((*stored.stack, *padded), dtype)
        chunks = [
            Chunk(**{**chunk, "offset": tuple(chunk["offset"]), "shape": tuple(chunk["shape"])})
            for entry in entries
            for chunk in entry["chunks"]
        ]
        write_metadata(self.folder, tensors, chunks, objects, common)

    def extra_states(self, source: Source) -> list[Chunk]:
        """Write the empty extra states that megatron-core asks for when it loads a model."""
        rows = [item.row for item in source.items() if not item.prefix]
        keys = {key for row in rows for key in stored_parameter(row, self.arch).extra_states}
        return self.objects(dict.fromkeys(sorted(keys), serialise([None])))

    def objects(self, payloads: Mapping[str, bytes]) -> list[Chunk]:
        """Write sharded objects by their keys, into a file of no rank of the layout."""
        with DistFile(self.folder, self.placement.num_ranks) as file:
            file.truncate(0)
            chunks = [file.append_object(key, payload) for key, payload in payloads.items()]
            file.flush()
        return chunks


def _stretch(whole: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """[start, stop) of a parameter along `dim`, with zeros past its end."""
    length = whole.shape[dim]
    part = whole.narrow(dim, min(start, length), max(0, min(stop, length) - start))
    if (missing := stop - max(start, length)) > 0:
        shape = list(whole.shape)
        shape[dim] = min(missing, stop - start)
        part = torch.cat([part, whole.new_zeros(shape)], dim)
    return part


def rewind(folder: Path, done: Iterable[Entry]) -> None:
    """Cut off what an interrupted conversion wrote after its last journal entry. On one process."""
    ends: dict[str, int] = {}
    for entry in done:
        for chunk in entry["chunks"]:
            ends[chunk["file"]] = max(ends.get(chunk["file"], 0), chunk["start"] + chunk["length"])
    for path in {folder / name for name in ends}.union(folder.glob("*.distcp")):
        end = ends.get(path.name, 0)
        if not path.exists() or path.stat().st_size < end:
            raise UserError(f"{path} has lost bytes that were written: remove {folder} and start again")
        with path.open("r+b") as file:
            file.truncate(end)
