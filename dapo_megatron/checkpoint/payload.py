"""What `torch.save` made of one tensor, located in a file without loading it; and pickles that may run no code."""

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record: lengths of its name and extra field at bytes 26 and 28


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles with the given classes and functions, by (module, name), and torch's dtypes.

    Raises:
        pickle.UnpicklingError: for any other, naming it.
    """

    def __init__(self, file: io.BytesIO, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """The class or function, if it is one of those expected."""
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place there")


@dataclass(frozen=True)
class Payload:
    """Where a tensor lies in a file: `base` is its storage's first byte, `size` that storage's bytes.

    `stride` and `first` (the first element's index in the storage) count elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    base: int
    size: int

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another in the order of their indices."""
        expected = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        return all(size == 1 or own == row for size, own, row in zip(self.shape, self.stride, expected, strict=True))


def describe(handle: int, start: int, length: int) -> Payload:
    """Find the one tensor in the `length` bytes at `start`, which `torch.save` wrote.

    Raises:
        ValueError: if they are anything else, saying what.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(handle, start, length))) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled = records["data.pkl"]
        at = _position(handle, start, pickled)
        described = _described(os.pread(handle, min(pickled.file_size, length), at))
        storage = records[f"data/{described.storage}"]
        payload = Payload(
            described.dtype,
            described.shape,
            described.stride,
            described.first,
            _position(handle, start, storage),
            storage.file_size,
        )
        last = payload.first + sum((n - 1) * step for n, step in zip(payload.shape, payload.stride, strict=True))
        if math.prod(payload.shape) and (last + 1) * payload.dtype.itemsize > min(payload.size, length):
            raise ValueError("its storage is too short for its shape")
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OSError, KeyError) as error:
        raise ValueError(f"it is not as torch.save writes a tensor: {error}") from None
    return payload


class _Window(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, handle: int, start: int, length: int) -> None:
        self._handle, self._start, self._length, self._at = handle, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError("seek to before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        read = os.preadv(self._handle, [view], self._start + self._at) if view else 0
        self._at += read
        return read


def _position(handle: int, start: int, record: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin in the file."""
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    header = start + record.header_offset
    name, extra = _LOCAL_HEADER.unpack(os.pread(handle, _LOCAL_HEADER.size, header))
    return header + _LOCAL_HEADER.size + int(name) + int(extra)


@dataclass(frozen=True)
class _Tensor:
    """What the pickle says of a tensor."""

    dtype: torch.dtype
    storage: str
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(RestrictedUnpickler):
    """Gives a `_Tensor` in place of the tensor."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled), _ALLOWED)

    def persistent_load(self, pid: Any) -> tuple[torch.dtype | None, str]:
        """(dtype if the kind of storage tells it, name) of a storage."""
        _, dtype, name, _, _ = pid
        return dtype, str(name)


def _described(pickled: bytes) -> _Tensor:
    try:
        described = _TensorUnpickler(pickled).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"it is not as torch.save writes a tensor: {error}") from None
    if not isinstance(described, _Tensor):
        raise ValueError("it is not as torch.save writes a tensor: it holds something else")
    return described


def _rebuild(
    storage: tuple[torch.dtype | None, str],
    first: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype | None = None,
    metadata: Any = None,
) -> _Tensor:
    """In place of torch's functions of these arguments, of which newer dtypes use the one with `dtype`."""
    found = dtype or storage[0]
    if not isinstance(found, torch.dtype):
        raise pickle.UnpicklingError("its dtype is not stated")
    described = _Tensor(found, storage[1], first, tuple(shape), tuple(stride))
    numbers = (first, *described.shape, *described.stride)
    if len(described.shape) != len(described.stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("its shape is none")
    return described


# All that a pickled tensor asks for. Older dtypes have each a kind of storage, newer ones an untyped storage.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): dtype for name, dtype in torch.storage._storage_type_to_dtype_map().items()},
}
