"""Conversions between Hugging Face folders and Megatron checkpoints of any layout, parameter by parameter.

While the shards of one parameter are written, the next is read and the checksums of the one before are computed; large
ones are alone in memory. The result appears whole or not at all, and an interrupted conversion goes on where it
was (`checkpoint/journal.py`). Under torchrun the processes share the parameters.
"""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoint.dist_writer import MegatronWriter, rewind
from dapo_megatron.checkpoint.distcp import Chunk
from dapo_megatron.checkpoint.hf import MAX_SHARD_BYTES, HFWriter, copy_without_weights
from dapo_megatron.checkpoint.journal import Entry, Workspace
from dapo_megatron.checkpoint.manifest import MANIFEST, Manifest, TensorRecord, dtype_name, read_manifest, record
from dapo_megatron.checkpoint.megatron import MegatronCheckpoint
from dapo_megatron.checkpoint.safetensors_file import Entry as HFEntry
from dapo_megatron.checkpoint.source import HFSource, Item, MegatronSource, Source, verify_state
from dapo_megatron.checkpoint.untrained import Untrained, base_of, missing_layers
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.sharding import merge_shards

AHEAD_BYTES = 256 << 20  # larger parameters are neither read ahead nor hashed while the next is read


@dataclass(frozen=True)
class Done:
    """A finished conversion: the folder, the manifest that lies in it, and the bytes of its tensors."""

    folder: Path
    manifest: Manifest
    num_bytes: int


def run(
    workspace: Workspace,
    source: Source,
    write: Callable[[Item, Tensor, list[Tensor]], list[Chunk]],
    cast: torch.dtype | None = None,
) -> list[Entry]:
    """Convert what is not done yet; the entries of everything, in the order of the source, on every process.

    Args:
        workspace: of the conversion.
        source: what is converted.
        write: writes an item: the whole parameter, and its Hugging Face tensors.
        cast: dtype of the weights that are written; as they are where None.

    Raises:
        UserError: if the source is damaged or the disk is full.
    """
    items = source.items()
    done = {entry["item"] for entry in workspace.done}
    left = [item for item in items if item.name not in done]
    hashing: deque[tuple[Entry, Future[dict[str, TensorRecord]], int]] = deque()

    def note_oldest() -> None:
        entry, records, size = hashing.popleft()
        _check(source, records.result())
        entry["tensors"] = {name: asdict(found) for name, found in records.result().items()}
        workspace.add(entry, size)

    try:
        with ThreadPoolExecutor(1) as checksums:
            for item, whole, tensors in _read_ahead(source, left[workspace.rank :: workspace.size], cast):
                records = checksums.submit(_records, item, tensors)
                chunks = [asdict(chunk) for chunk in write(item, whole, tensors)]
                hashing.append(({"item": item.name, "chunks": chunks}, records, whole.nbytes))
                while len(hashing) > (1 if whole.nbytes <= AHEAD_BYTES else 0):
                    note_oldest()
                del whole, tensors  # before the next is read
            while hashing:
                note_oldest()
    except BaseException:
        workspace.abandon()
        raise
    entries = {entry["item"]: entry for entry in workspace.all_entries()}
    return [entries[item.name] for item in items]


def _read_ahead(
    source: Source, items: Sequence[Item], cast: torch.dtype | None
) -> Iterator[tuple[Item, Tensor, list[Tensor]]]:
    """Every item with its whole parameter and its tensors; the next, if not large, is read while one is worked on."""

    def read(item: Item) -> tuple[Tensor, list[Tensor]]:
        whole, tensors = source.read(item)
        dtype = written_dtype(source, item, cast)
        if all(tensor.dtype == dtype for tensor in tensors):
            return whole, tensors
        if source.known:  # what is written will have other checksums
            _check(source, _records(item, tensors))
        del tensors
        whole = whole.to(dtype)
        return whole, merge_shards(item.row.rule, [whole])

    def start(i: int) -> Future[tuple[Tensor, list[Tensor]]] | None:
        size = math.prod(items[i].row.rule.shape) * source.dtype(items[i]).itemsize if i < len(items) else math.inf
        return reader.submit(read, items[i]) if size <= AHEAD_BYTES else None

    with ThreadPoolExecutor(1) as reader:
        ahead = start(0)
        for i, item in enumerate(items):
            whole, tensors = ahead.result() if ahead is not None else read(item)
            ahead = start(i + 1)
            yield item, whole, tensors
            del whole, tensors


def _records(item: Item, tensors: Sequence[Tensor]) -> dict[str, TensorRecord]:
    return {name: record(tensor) for name, tensor in zip(item.tensor_names, tensors, strict=True)}


def _check(source: Source, records: Mapping[str, TensorRecord]) -> None:
    """Refuse to pass on what the source's own manifest does not know in this dtype."""
    for name, found in records.items():
        if name in source.known and found.dtype == source.known[name].dtype and found != source.known[name]:
            raise UserError(f"{source.folder} is damaged: {name} is not what its {MANIFEST} says")


def manifest_of(entries: Iterable[Entry], **attributes: Any) -> Manifest:
    """What the entries say of the tensors."""
    tensors = {
        name: TensorRecord(tuple(value["shape"]), value["dtype"], value["sha256"])
        for entry in entries
        for name, value in entry["tensors"].items()
    }
    return Manifest(tensors, **attributes)


def written_dtype(source: Source, item: Item, cast: torch.dtype | None) -> torch.dtype:
    """In which dtype an item is written: `cast` is for weights, not for an optimizer's states nor for fp32 buffers."""
    return source.dtype(item) if cast is None or item.prefix or item.row.is_buffer else cast


def num_bytes(source: Source, cast: torch.dtype | None) -> int:
    """Bytes of everything that is converted."""
    return sum(written_dtype(source, item, cast).itemsize * math.prod(item.row.rule.shape) for item in source.items())


def check_space(out: Path, needed: int) -> None:
    """Refuse a conversion whose result will not fit on the disk, beside what an interrupted one has written.

    On the first process: it soon removes what others would still be counting.

    Raises:
        UserError: with both numbers.
    """
    if int(os.environ.get("RANK", 0)):
        return
    beside = out.with_name(out.name + ".incomplete")
    needed -= sum(path.stat().st_blocks * 512 for path in beside.rglob("*") if path.is_file())
    parent = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(f"--out: {out} needs {needed / 1e9:.2f} GB more, but {parent} has {free / 1e9:.2f} GB free")


def describe_job(source: Source, dtype: torch.dtype | None, **options: Any) -> Entry:
    """What distinguishes a conversion from others that may have been begun in the same place."""
    files = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(source.folder.iterdir()) if p.is_file()]
    return {
        "source": str(source.folder.absolute()),
        "files": files,
        "items": len(source.items()),
        "dtype": dtype and dtype_name(dtype),
        **options,
    }


def write_shards(
    source: Source, out: Path, parallel: ParallelConfig, dtype: torch.dtype | None = None
) -> tuple[Workspace, MegatronWriter, list[Entry]]:
    """Write everything of a source as the shards of a layout. What makes a checkpoint of them is left to be done.

    Returns:
        The workspace, the writer, and an entry for each item.
    """
    check_space(out, num_bytes(source, dtype))
    job = describe_job(source, dtype, layout=parallel.layout(0))
    workspace = Workspace(out, job, lambda: writer.flush())
    if workspace.rank == 0:
        rewind(workspace.folder, workspace.done)
    workspace.barrier()
    writer = MegatronWriter(workspace.folder, source.arch, parallel, workspace.rank)
    try:
        entries = run(workspace, source, lambda item, whole, _: writer.write(item, whole), dtype)
    finally:
        writer.close()
    return workspace, writer, entries


def hf_to_megatron(hf: Path, out: Path, parallel: ParallelConfig, *, dtype: torch.dtype | None = None) -> Done:
    """Convert a Hugging Face folder into a Megatron checkpoint whose files are cut as `parallel` shards the model.

    Args:
        hf: the source; it is not changed.
        out: the new folder. It also gets everything of the source but the weights, and a manifest.
        parallel: a layout that the model can have.
        dtype: of the weights; those of the source where None.

    Raises:
        UserError: if the source is damaged or of another model, `out` exists, or the disk is full.
    """
    source = HFSource(hf, cast=dtype)
    workspace, writer, entries = write_shards(source, out, parallel, dtype)
    manifest = manifest_of(entries, copies=source.copies, layout=parallel.layout(0))
    if workspace.rank == 0:
        writer.finish(source, entries, {}, writer.extra_states(source))
        copy_without_weights(hf, workspace.folder)
        manifest.write(workspace.folder)
        workspace.publish()
    workspace.barrier()
    return Done(out, manifest, num_bytes(source, dtype))


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    base: Path | None = None,
    shard_bytes: int = MAX_SHARD_BYTES,
) -> Done:
    """Convert the weights of a Megatron checkpoint into a Hugging Face folder.

    Args:
        checkpoint: a converted checkpoint or a run's saved state, in any layout.
        out: the new folder.
        dtype: of the weights; those of the checkpoint where None.
        base: a Hugging Face folder with the tensors that training left out (multi-token prediction).
        shard_bytes: the largest size of a file.

    Raises:
        UserError: as `hf_to_megatron`, and if the model has tensors that neither the checkpoint nor `base` holds.
    """
    source = MegatronSource(MegatronCheckpoint(checkpoint), weights_only=True)
    copies = read_manifest(checkpoint).copies if (checkpoint / MANIFEST).exists() else {}
    layers = missing_layers(source.arch, source.checkpoint.rows)
    start = base or (base_of(checkpoint) if layers else None)
    rest = Untrained(layers, start, dtype, needed=base is not None)
    verify_state(checkpoint)
    entries = [
        HFEntry(name, written_dtype(source, item, dtype), shape)
        for item in source.items()
        for name, shape in zip(item.row.hf_names, item.row.rule.hf_shapes, strict=True)
    ]
    entries += rest.entries
    originals = {entry.name: entry for entry in entries}
    entries += [replace(originals[original], name=copy) for copy, original in copies.items()]
    check_space(out, sum(entry.nbytes for entry in entries))
    job = describe_job(source, dtype, base=str(base), shard_bytes=shard_bytes)
    workspace = Workspace(out, job, lambda: writer.flush())
    writer = HFWriter(workspace.folder, entries, shard_bytes)
    if workspace.rank == 0:
        if workspace.done and (lost := writer.missing()):
            raise UserError(
                f"{workspace.folder / lost[0]} has lost bytes that were written: remove {workspace.folder} and start "
                "again"
            )
        writer.create()
    workspace.barrier()

    def write(item: Item, _: Tensor, tensors: list[Tensor]) -> list[Chunk]:
        for name, tensor in zip(item.row.hf_names, tensors, strict=True):
            for target in (name, *(copy for copy, original in copies.items() if original == name)):
                writer.write(target, tensor)
        return []

    done = run(workspace, source, write, dtype)
    manifest = manifest_of(done, copies=copies)
    if workspace.rank == 0:
        for name, tensor in rest:
            manifest.tensors[name] = record(tensor)
            writer.write(name, tensor)
        writer.finish(checkpoint, entries[0].dtype)
        manifest.write(workspace.folder)
        workspace.publish()
    workspace.barrier()
    return Done(out, manifest, sum(entry.nbytes for entry in entries))
