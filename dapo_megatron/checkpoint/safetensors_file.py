"""One safetensors file: read tensor by tensor, or written in any order by any number of processes.

The format: 8 bytes with the length of the header, the header in JSON, the tensors one after another.
"""

import json
import math
import os
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoint.raw import as_bytes, disk_errors, read_box, read_into, write_from
from dapo_megatron.errors import UserError

# In the order in which safetensors lays tensors out: widest first, then by its own numbering of the types.
_DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {dtype: i for i, dtype in enumerate(_NAMES)}
_MAX_HEADER = 100_000_000  # bytes; the library reads no longer one


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """An open file. `entries` says what it holds, by name; threads may read at once.

    Raises:
        UserError: if the file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._handle = os.open(self.path, os.O_RDONLY)
            self._close = weakref.finalize(self, os.close, self._handle)
            self.entries, self._offsets = _read_header(self._handle)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; without it, that happens when the object goes."""
        self._close()

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor `name`, or its stretch [start, stop) along `dim`: contiguous, in the dtype of the file.

        Raises:
            UserError: if the file has no such tensor, the stretch leaves it, or the file was cut since it was opened.
        """
        if name not in self.entries:
            raise UserError(f"{self.path} has no tensor {name}")
        entry = self.entries[name]
        offset, box = [0] * len(entry.shape), list(entry.shape)
        if dim is not None:
            if not (0 <= dim < len(box) and 0 <= start <= stop <= box[dim]):
                raise UserError(
                    f"{self.path} holds {name} in shape {list(entry.shape)}: there is no [{start}, {stop}) of "
                    f"dimension {dim}"
                )
            offset[dim], box[dim] = start, stop - start
        try:
            return read_box(self._handle, self._offsets[name], entry.dtype, entry.shape, offset, box)
        except (OSError, EOFError) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a file to be written: its first bytes, each tensor's offset, its size in bytes."""

    header: bytes
    offsets: dict[str, int]
    size: int


def layout(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout that `safetensors.torch.save_file` gives the same tensors, byte for byte.

    Args:
        entries: the tensors, in any order; the layout's own is by dtype and name.
        metadata: the header's, {"format": "pt"} if None. Of several keys the library does not fix the order.

    Raises:
        ValueError: if a name is given twice or a dtype cannot be stored.
    """
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise ValueError(f"{entry.name}: safetensors files hold no {entry.dtype}")
    header: dict[str, Any] = {"__metadata__": dict(metadata if metadata is not None else {"format": "pt"})}
    position = 0
    for entry in sorted(entries, key=lambda entry: (_ORDER[entry.dtype], entry.name)):
        if entry.name in header:
            raise ValueError(f"{entry.name} is given twice, or is no name of a tensor")
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    offsets = {entry.name: first + header[entry.name]["data_offsets"][0] for entry in entries}
    return Layout(struct.pack("<Q", len(text)) + text, offsets, first + position)


def write_header(
    path: str | Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Make a file of its final size, all but the tensors in place; returns each tensor's offset for `write_tensor`.

    The room is reserved at once, so that a disk too small fails now and not hours later.

    Raises:
        UserError: if the disk is full; no file is left then.
        ValueError: as `layout`.
    """
    plan = layout(entries, metadata)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with disk_errors(path):
            os.posix_fallocate(handle, 0, plan.size)
            write_from(handle, memoryview(plan.header), 0)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return plan.offsets


def write_tensor(file: str | Path | int, offset: int, tensor: Tensor) -> None:
    """Write a tensor's bytes at `offset` of an existing file, given as path or descriptor.

    Raises:
        UserError: if the disk is full.
    """
    data = as_bytes(tensor.cpu())
    if isinstance(file, int):
        with disk_errors(f"file descriptor {file}"):
            write_from(file, data, offset)
        return
    handle = os.open(file, os.O_WRONLY)
    try:
        with disk_errors(file):
            write_from(handle, data, offset)
    finally:
        os.close(handle)


def _read_header(handle: int) -> tuple[dict[str, Entry], dict[str, int]]:
    """Entries and offsets of all tensors. Raises ValueError or EOFError, saying what is wrong."""
    size = os.fstat(handle).st_size
    start = bytearray(8)
    read_into(handle, memoryview(start), 0)
    (length,) = struct.unpack("<Q", start)
    if length > min(_MAX_HEADER, size - 8):
        raise ValueError(f"its header has {length} bytes, the file {size}: it is truncated or no safetensors file")
    text = bytearray(length)
    read_into(handle, memoryview(text), 8)
    header = json.loads(text, object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    spans = {name: _entry(name, described) for name, described in header.items()}
    position = 0
    for entry, begin, end in sorted(spans.values(), key=lambda span: span[1:]):
        if begin != position or end - begin != entry.nbytes:
            raise ValueError(
                f"{entry.name} does not lie where the tensor before it ends, or has not the size it states"
            )
        position = end
    if size != 8 + length + position:
        raise ValueError(f"it has {size} bytes, its header says {8 + length + position}: it is truncated or damaged")
    entries = {name: entry for name, (entry, _, _) in spans.items()}
    return entries, {name: 8 + length + begin for name, (_, begin, _) in spans.items()}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header names a tensor twice")
    return found


def _entry(name: str, described: Any) -> tuple[Entry, int, int]:
    """(entry, begin, end) of a tensor, its data's offsets as the header has them."""
    try:
        dtype, shape, (begin, end) = described["dtype"], tuple(described["shape"]), described["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"its header does not describe {name}") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"the shape or place of {name} is no number")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has the dtype {dtype}, which is not known")
    return Entry(name, _DTYPES[dtype], shape), begin, end
