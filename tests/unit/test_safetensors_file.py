"""One safetensors file: what the library writes is read, what is written is what the library writes."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.checkpoint import raw
from dapo_megatron.checkpoint.safetensors_file import Entry, SafetensorsFile, write_header, write_tensor
from dapo_megatron.errors import UserError

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
BOX = torch.arange(5 * 6 * 7, dtype=torch.float32).view(5, 6, 7)


def mixed() -> dict[str, Tensor]:
    """A tensor of each dtype, and names and shapes that are out of the ordinary."""
    random = torch.Generator().manual_seed(1)
    found = {
        str(dtype): torch.randint(0, 2, (3, dtype.itemsize * 5), dtype=torch.uint8, generator=random).view(dtype)
        for dtype in DTYPES
    }
    return found | {
        'odd "name" \u00e9\n': torch.ones(3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "cube": BOX,
    }


def entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tensor.dtype, tuple(tensor.shape))


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit: some dtypes have no comparison, and NaN differs from itself."""
    return entry("", found) == entry("", expected) and bytes(raw.as_bytes(found)) == bytes(
        raw.as_bytes(expected.contiguous())
    )


def test_written_file_is_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    tensors = mixed()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    offsets = write_header(tmp_path / "ours", [entry(*item) for item in tensors.items()])
    for name, tensor in reversed(tensors.items()):  # in any order
        write_tensor(tmp_path / "ours", offsets[name], tensor)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_dtype_and_shape_is_read(tmp_path: Path) -> None:
    tensors = mixed()
    save_file(tensors, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file:
        assert file.entries == {name: entry(name, tensor) for name, tensor in tensors.items()}
        assert all(same(file.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 3), (4, 5), (2, 2)])
@pytest.mark.parametrize(("long", "block"), [(1, 1), (10_000, 1), (10_000, 60)])
def test_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, start: int, stop: int, long: int, block: int
) -> None:
    """Whether stretches are read one by one, or with what lies between them: row by row or several at once."""
    monkeypatch.setattr(raw, "_LONG", long)
    monkeypatch.setattr(raw, "_BLOCK", block)
    save_file({"cube": BOX, "row": torch.arange(9)}, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file:
        found = file.read("cube", dim, start, stop)
        assert same(found, BOX.narrow(dim, start, stop - start))
        assert found.is_contiguous()
        assert same(file.read("row", 0, start, stop), torch.arange(9)[start:stop])


def test_only_the_stretch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
    save_file({"wide": wide}, tmp_path / "file")
    read: list[int] = []
    into = raw.read_into

    def counted(handle: int, view: memoryview, offset: int) -> None:
        read.append(len(view))
        into(handle, view, offset)

    monkeypatch.setattr(raw, "read_into", counted)
    monkeypatch.setattr(raw, "_LONG", 4096)
    with SafetensorsFile(tmp_path / "file") as file:
        assert same(file.read("wide", 0, 10, 12), wide[10:12])
        assert sum(read) == 2 * 4096 * 4
        read.clear()
        assert same(file.read("wide", 1, 1024, 3072), wide[:, 1024:3072])
        assert sum(read) == 64 * 2048 * 4
        read.clear()
        monkeypatch.setattr(raw, "_BLOCK", 1 << 16)
        assert same(file.read("wide", 1, 7, 9), wide[:, 7:9])
        assert max(read) <= 1 << 16


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 4, 6), (1, -1, 2), (2, 5, 4), (3, 0, 1)])
def test_stretch_outside_the_tensor(tmp_path: Path, dim: int, start: int, stop: int) -> None:
    save_file({"cube": BOX}, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file, pytest.raises(UserError, match=r"holds cube in shape \[5, 6, 7\]"):
        file.read("cube", dim, start, stop)


def test_tensor_that_is_not_there(tmp_path: Path) -> None:
    save_file({"cube": BOX}, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file, pytest.raises(UserError, match="has no tensor sphere"):
        file.read("sphere")


@pytest.mark.parametrize("size", [0, 4, 60, 150, -1])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    save_file({"cube": BOX}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=f"{path} cannot be read: it"):
        SafetensorsFile(path)


def test_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    save_file({"cube": BOX}, tmp_path / "file")
    with SafetensorsFile(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", 500)
        with pytest.raises(UserError, match="ends at byte 500"):
            file.read("cube")


def broken(**changes: Any) -> dict[str, Any]:
    """The header of two tensors of 4 bytes, `b` changed."""
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {"a": tensor, "b": tensor | {"data_offsets": [4, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (broken(data_offsets=[0, 4]), "b does not lie where"),
        (broken(data_offsets=[5, 9]), "b does not lie where"),
        (broken(data_offsets=[4, 6]), "b does not lie where"),
        (broken(data_offsets=[4, 12], shape=[2]), "its header says 1"),
        ({"a": broken()["a"]}, "it has .* bytes, its header says"),  # and 4 more follow
        (broken(data_offsets=[8, 4], shape=[-1]), "the shape or place of b is no number"),
        (broken(shape=["1"]), "the shape or place of b is no number"),
        (broken(dtype="F3"), "b has the dtype F3, which is not known"),
        (broken(shape=None), "does not describe b"),
        ({"a": 1}, "does not describe a"),
        ([], "its header is no object"),
        (b'{"a": 1, "a": 2}', "its header names a tensor twice"),
        (b"{", "cannot be read"),
        (b"\xff{}", "cannot be read"),
    ],
)
def test_header_that_is_wrong(tmp_path: Path, header: Any, message: str) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(
        UserError, match=f"{tmp_path}/file cannot be read: .*{message}" if message[:6] != "cannot" else message
    ):
        SafetensorsFile(tmp_path / "file")


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        SafetensorsFile(tmp_path / "file")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_header(path / "too-large", [Entry("x", torch.uint8, (1 << 60,))]),
        lambda path: write_tensor("/dev/full", 0, torch.ones(3)),
    ],
)
def test_full_disk(tmp_path: Path, write: Callable[[Path], object]) -> None:
    with pytest.raises(UserError, match="cannot be written, disk full"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []  # what cannot hold its tensors does not stay


def test_written_from_any_view(tmp_path: Path) -> None:
    offsets = write_header(tmp_path / "file", [Entry("x", torch.float32, (6, 5))])
    whole = torch.arange(60.0).view(5, 12)
    write_tensor(tmp_path / "file", offsets["x"], whole[:, ::2].t())
    assert torch.equal(load_file(tmp_path / "file")["x"], whole[:, ::2].t())


def test_tensors_that_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors files hold no torch\.complex128"):
        write_header(tmp_path / "file", [Entry("x", torch.complex128, ())])
    with pytest.raises(ValueError, match="x is given twice"):
        write_header(tmp_path / "file", [Entry("x", torch.int8, (1,))] * 2)


def test_large_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may do less than it is asked for; above 2 GiB it always does."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda handle, view, offset: write(handle, view[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda handle, views, offset: read(handle, [views[0][:11]], offset))
    offsets = write_header(tmp_path / "file", [Entry("cube", torch.float32, (5, 6, 7))])
    write_tensor(tmp_path / "file", offsets["cube"], BOX)
    with SafetensorsFile(tmp_path / "file") as file:
        assert same(file.read("cube"), BOX)
    assert torch.equal(load_file(tmp_path / "file")["cube"], BOX)
