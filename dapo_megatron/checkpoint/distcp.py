"""Megatron's distributed checkpoints ("torch_dist"), chunk by chunk and without torch.distributed.

A folder holds `metadata.json` (the format), `common.pt` (what is not sharded), `.metadata` (a pickle: which file has
which box of which tensor) and `__<rank>_<number>.distcp`, chunks one after another, each as `torch.save` writes it.
"""

import collections
import io
import itertools
import json
import math
import os
import pathlib
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as filesystem_classes
from torch.distributed.checkpoint import metadata as metadata_classes
from torch.distributed.checkpoint import planner as planner_classes
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.strategies import torch as megatron_classes
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from dapo_megatron.checkpoint.boxes import Part, Shape, covered, shared, slices
from dapo_megatron.checkpoint.payload import Payload, RestrictedUnpickler, describe
from dapo_megatron.checkpoint.raw import as_bytes, disk_errors, read_box, read_into
from dapo_megatron.errors import UserError
from dapo_megatron.files import write_atomically

METADATA = ".metadata"
_FORMAT = "torch_dist"


# All that a `.metadata` of Megatron's holds, old ones included.
_ALLOWED: dict[tuple[str, str], Any] = {
    (module.__name__, name): vars(module)[name]
    for module, names in (
        (metadata_classes, ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
        (metadata_classes, ("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        (planner_classes, ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
        (filesystem_classes, ("_StorageInfo", "_StoragePrefix")),
        (megatron_classes, ("MCoreMetadata", "MCoreSavePlan")),
        (torch, ("Size",)),
        (torch.serialization, ("_get_layout",)),
        (pathlib, ("PosixPath",)),
        (collections, ("OrderedDict",)),
    )
    for name in names
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file; of an object, whose `offset` and `shape` are (), the whole.

    `start` and `length` are the payload's place in `file`, in bytes.
    """

    key: str
    offset: Shape
    shape: Shape
    file: str
    start: int
    length: int


class DistFile:
    """Appends chunks to `__<rank>_<number>.distcp` in `folder`; a file that is there is continued.

    A chunk that could not be written whole is taken back. Not for several threads.
    """

    def __init__(self, folder: str | Path, rank: int, number: int = 0) -> None:
        self.path = Path(folder) / f"__{rank}_{number}.distcp"
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        self.length = os.lseek(self._handle, 0, os.SEEK_END)

    def __enter__(self) -> "DistFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, key: str, offset: Sequence[int], tensor: Tensor) -> Chunk:
        """Write `tensor`, from any device, as the box of `key` that begins at `offset`.

        The shape of a chunk has as many dimensions as the whole tensor: leading ones where Megatron stacks layers.

        Raises:
            UserError: if the disk is full.
        """
        if len(offset) != tensor.dim():
            raise ValueError(f"{key}: a chunk of shape {tuple(tensor.shape)} cannot lie at {tuple(offset)}")
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes the whole storage
            tensor = _alone(tensor)
        with self._appending() as stream, _without_checksums():
            torch.save(tensor, cast(IO[bytes], stream))
        return self._chunk(key, tuple(offset), tuple(tensor.shape), stream.start)

    def append_object(self, key: str, payload: bytes) -> Chunk:
        """Write what `serialise` made of a list of one object or `DistReader.object_bytes` read. Raises as `append`."""
        with self._appending() as stream:
            stream.write(payload)
        return self._chunk(key, (), (), stream.start)

    def truncate(self, length: int) -> None:
        """Drop all chunks from byte `length` on."""
        if length > self.length:
            raise UserError(f"{self.path} has {self.length} bytes, {length} were written: it is damaged")
        os.ftruncate(self._handle, length)
        os.lseek(self._handle, length, os.SEEK_SET)
        self.length = length

    def flush(self) -> None:
        """Put everything that was written on the disk."""
        with disk_errors(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file, without flushing it to the disk."""
        os.close(self._handle)

    def _chunk(self, key: str, offset: Shape, shape: Shape, start: int) -> Chunk:
        return Chunk(key, offset, shape, self.path.name, start, self.length - start)

    @contextmanager
    def _appending(self) -> Iterator["_Stream"]:
        """A stream at the end of the file, which counts as part of it once it was written without an error."""
        stream = _Stream(self._handle, self.length)
        try:
            with disk_errors(self.path):
                yield stream
                stream.check()
        except BaseException:
            os.ftruncate(self._handle, self.length)
            os.lseek(self._handle, self.length, os.SEEK_SET)
            raise
        self.length = stream.position


def _alone(tensor: Tensor) -> Tensor:
    """A contiguous view as a tensor whose storage is those elements and no others: the same memory, not a copy."""
    if not tensor.numel():
        return tensor.clone()
    return torch.frombuffer(as_bytes(tensor), dtype=tensor.dtype).view(tensor.shape)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Let torch.save leave out the zip's checksums, which cost as much as the writing and which torch never reads."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Stream:
    """What torch.save writes to. It keeps an error for later, for torch's zip writer cannot be left by one."""

    def __init__(self, handle: int, start: int) -> None:
        self.start = self.position = start
        self._handle = handle
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        length = len(view)
        try:
            while view and self._error is None:
                written = os.write(self._handle, view)
                view = view[written:]
        except OSError as error:
            self._error = error
        self.position += length
        return length

    def flush(self) -> None:
        """Nothing is held back."""

    def check(self) -> None:
        """Raise what a `write` met."""
        if self._error is not None:
            raise self._error


def serialise(content: Any) -> bytes:
    """What `torch.save` writes. Megatron writes a sharded object as a list of it alone."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def write_metadata(
    folder: str | Path,
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
    chunks: Iterable[Chunk],
    objects: Iterable[Chunk] = (),
    common: Mapping[str, Any] | None = None,
) -> None:
    """Make the `.distcp` files of a folder a checkpoint that `megatron.core.dist_checkpointing` loads.

    Args:
        folder: where the files of the chunks are, from any number of writers.
        tensors: (shape, dtype) of every whole tensor.
        chunks: the boxes they are made of, in any order; each element is in one of them.
        objects: the sharded objects. A key ends in Megatron's /shard_<index>_<count>.
        common: what is not sharded; nothing if None.

    Raises:
        UserError: if the disk is full.
        ValueError: if chunks of a tensor are missing, doubled, or leave it.
    """
    folder = Path(folder)
    by_key: dict[str, list[Chunk]] = {key: [] for key in tensors}
    for chunk in chunks:
        by_key[chunk.key].append(chunk)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, (shape, dtype) in tensors.items():
        boxes = sorted(by_key[key], key=lambda chunk: chunk.offset)
        _check_boxes(key, tuple(shape), boxes)
        described[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes],
        )
        storage |= {MetadataIndex(key, box.offset): _StorageInfo(box.file, box.start, box.length) for box in boxes}
    for chunk in objects:
        described[chunk.key] = BytesStorageMetadata()
        storage[MetadataIndex(chunk.key)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    index = Metadata(described, storage_data=storage, version=CURRENT_DCP_VERSION)
    with disk_errors(folder):  # what says that a checkpoint is there comes last
        write_atomically(folder / COMMON_STATE_FNAME, serialise(dict(common or {})))
        write_atomically(folder / METADATA, pickle.dumps(index))
        write_atomically(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig(_FORMAT))).encode())


def _check_boxes(key: str, shape: Shape, boxes: Sequence[Chunk]) -> None:
    """Raise ValueError unless the boxes lie in the tensor and make up its size."""
    for box in boxes:
        fits = len(box.offset) == len(box.shape) == len(shape)
        if not fits or any(o + n > size for o, n, size in zip(box.offset, box.shape, shape, strict=True)):
            raise ValueError(f"{key}: a chunk of shape {box.shape} at {box.offset} leaves the tensor of shape {shape}")
    found = sum(math.prod(box.shape) for box in boxes)
    if found != math.prod(shape) or len({box.offset for box in boxes}) < len(boxes):
        raise ValueError(f"{key}: its {len(boxes)} chunks have {found} elements, the tensor has {math.prod(shape)}")


class DistReader:
    """Reads a checkpoint's tensors and objects. Threads may share it.

    Attributes:
        folder: of the checkpoint.
        tensors: (shape, dtype) of every whole tensor.
        objects: keys of the sharded objects.

    Raises:
        UserError: if the folder is no such checkpoint, is damaged, or its `.metadata` holds what does not belong there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._check_format()
        try:
            index = RestrictedUnpickler(io.BytesIO((self.folder / METADATA).read_bytes()), _ALLOWED).load()
            self._read_index(index.state_dict_metadata, index.storage_data)
        except Exception as error:  # a damaged pickle raises anything
            raise UserError(f"{self.folder / METADATA} cannot be read: {error or type(error).__name__}") from None
        self._check_files()
        self._bounds: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self._payloads: dict[tuple[str, int], Payload] = {}

    def chunks(self, key: str) -> list[Chunk]:
        """The boxes that a tensor is stored in, in the order of their offsets. Raises UserError for an unknown key."""
        if key not in self.tensors:
            raise UserError(f"{self.folder} has no tensor {key}")
        return self._chunks[key]

    def read(self, key: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """A box of a tensor, contiguous, from the parts of the chunks that meet it; the whole without a box.

        Holds beside it at most one part that is not a stretch of it, or a whole chunk where one is not stored in the
        order of its indices.

        Raises:
            UserError: if the checkpoint has no such tensor, it does not fill the box, or a file is damaged.
        """
        chunks, (whole, dtype) = self.chunks(key), self.tensors[key]
        begin: Shape = tuple(offset) if offset is not None else (0,) * len(whole)
        sizes: Shape = tuple(shape) if shape is not None else whole
        if not len(whole) == len(begin) == len(sizes) or any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(begin, sizes, whole, strict=True)
        ):
            raise UserError(f"{self.folder} holds {key} in shape {whole}: there is no {sizes} at {begin} of it")
        if not math.prod(sizes):
            return torch.empty(sizes, dtype=dtype)
        met = {i: shared(chunks[i].offset, chunks[i].shape, begin, sizes) for i in self._that_meet(key, begin, sizes)}
        if not covered(met.values(), sizes):
            raise UserError(f"{self.folder / METADATA} leaves parts of {sizes} at {begin} of {key} without bytes")
        if len(met) == 1:
            ((i, part),) = met.items()
            return self._read_part(chunks[i], part, dtype)
        found = torch.empty(sizes, dtype=dtype)
        for i, part in met.items():
            self._read_part(chunks[i], part, dtype, found[part.slices])
        return found

    def object_bytes(self, key: str) -> bytes:
        """An object as it lies in its file, for `DistFile.append_object`. Raises UserError as `read`."""
        if key not in self.objects:
            raise UserError(f"{self.folder} has no object {key}")
        chunk = self._objects[key]
        content = bytearray(chunk.length)
        with self._reading(chunk) as handle:
            read_into(handle, memoryview(content), chunk.start)
        return bytes(content)

    def read_object(self, key: str) -> Any:
        """A sharded object, of the types that Megatron puts into checkpoints. Raises UserError as `read`."""
        content = self._load(io.BytesIO(self.object_bytes(key)), f"{self.folder}: {key}")
        return content[0] if isinstance(content, list) and len(content) == 1 else content

    def common(self) -> Any:
        """What is not sharded: a dictionary. Raises UserError where it cannot be read or asks for other code."""
        return self._load(self.folder / COMMON_STATE_FNAME, str(self.folder / COMMON_STATE_FNAME))

    def _check_format(self) -> None:
        """Raise UserError unless this is a checkpoint in the format of this module."""
        path = self.folder / CONFIG_FNAME
        if not path.exists():
            raise UserError(f"{self.folder} is no Megatron distributed checkpoint: it has no {CONFIG_FNAME}")
        try:
            found = json.loads(path.read_text())["sharded_backend"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read: {error!r}") from None
        if found != _FORMAT:
            raise UserError(f"{path} states the format {found}; only {_FORMAT} can be read")

    def _read_index(self, described: Mapping[str, Any], storage: Mapping[MetadataIndex, Any]) -> None:
        """Set tensors, objects and chunks."""
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        self._chunks: dict[str, list[Chunk]] = defaultdict(list)
        self._objects: dict[str, Chunk] = {}
        for key, entry in described.items():
            if isinstance(entry, BytesStorageMetadata):
                self._objects[key] = _stored(key, (), (), storage[MetadataIndex(key)])
                continue
            self.tensors[key] = tuple(entry.size), entry.properties.dtype
            for box in sorted(entry.chunks, key=lambda box: tuple(box.offsets)):
                if not len(box.offsets) == len(box.sizes) == len(entry.size):
                    raise ValueError(f"a chunk of {key} has not as many dimensions as the tensor")
                found = _stored(key, tuple(box.offsets), tuple(box.sizes), storage[MetadataIndex(key, box.offsets)])
                self._chunks[key].append(found)
        self.objects = set(self._objects)

    def _check_files(self) -> None:
        """Raise UserError if a file is missing or too short for what it holds."""
        ends: dict[str, int] = defaultdict(int)
        for chunk in itertools.chain(self._objects.values(), *self._chunks.values()):
            ends[chunk.file] = max(ends[chunk.file], chunk.start + chunk.length)
        for file, end in ends.items():
            path = self.folder / file
            if not path.exists():
                raise UserError(f"{path} is missing, {METADATA} places parts of the checkpoint there")
            if path.stat().st_size < end:
                raise UserError(f"{path} is truncated: it has {path.stat().st_size} bytes of {end}")

    def _that_meet(self, key: str, offset: Shape, shape: Shape) -> list[int]:
        """Indices of the chunks that share an element with a box."""
        if key not in self._bounds:
            chunks = self._chunks[key]
            table = len(chunks), len(self.tensors[key][0])  # of a scalar it has no columns
            starts = np.array([chunk.offset for chunk in chunks], np.int64).reshape(table)
            sizes = np.array([chunk.shape for chunk in chunks], np.int64).reshape(table)
            self._bounds[key] = starts, starts + sizes
        starts, stops = self._bounds[key]
        begin = np.array(offset, np.int64)
        meeting = (starts < begin + np.array(shape, np.int64)) & (stops > begin)
        return [int(i) for i in np.flatnonzero(meeting.all(axis=1))]

    def _read_part(self, chunk: Chunk, part: Part, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
        """A part of a chunk, from the file; in `place` where that is given."""
        with self._reading(chunk) as handle:
            if (chunk.file, chunk.start) not in self._payloads:
                self._payloads[chunk.file, chunk.start] = describe(handle, chunk.start, chunk.length)
            payload = self._payloads[chunk.file, chunk.start]
            if payload.dtype != dtype or _without_ones(payload.shape) != _without_ones(chunk.shape):
                raise ValueError(
                    f"{chunk.key} has {payload.dtype} {payload.shape} there, {METADATA} states {dtype} {chunk.shape}"
                )
            if payload.contiguous:
                base = payload.base + payload.first * dtype.itemsize
                straight = place if place is not None and place.is_contiguous() else None
                found = read_box(handle, base, dtype, chunk.shape, part.within, part.shape, straight)
                return found if place is None or straight is not None else place.copy_(found)
            count = payload.size // dtype.itemsize
            storage = read_box(handle, payload.base, dtype, (count,), (0,), (count,))
        tensor = storage.as_strided(payload.shape, payload.stride, payload.first).reshape(chunk.shape)
        found = tensor[slices(part.within, part.shape)]
        return found.contiguous() if place is None else place.copy_(found)

    @contextmanager
    def _reading(self, chunk: Chunk) -> Iterator[int]:
        """The open file of a chunk; what is wrong with it becomes a UserError.

        Files are not kept open: a large run's checkpoint has more of them than a process may have.
        """
        path = self.folder / chunk.file
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                yield handle
            finally:
                os.close(handle)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    @staticmethod
    def _load(source: Path | io.BytesIO, name: str) -> Any:
        """Load with the types that torch and Megatron count as safe (Megatron registers its own)."""
        try:
            return torch.load(source, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises anything
            asked = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it asks for {asked[1]}, which has no place there" if asked else str(error).partition("\n")[0]
            raise UserError(f"{name} cannot be read: {reason}") from None


def _stored(key: str, offset: Shape, shape: Shape, info: Any) -> Chunk:
    """A chunk from what `.metadata` says of its place."""
    if info.transform_descriptors:
        raise ValueError(f"{key} is stored with {list(info.transform_descriptors)}, which cannot be read")
    if Path(info.relative_path).name != info.relative_path or min(info.offset, info.length) < 0:
        raise ValueError(f"{key} lies in {info.relative_path}, which is no file of the folder")
    return Chunk(key, offset, shape, info.relative_path, info.offset, info.length)


def _without_ones(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]
