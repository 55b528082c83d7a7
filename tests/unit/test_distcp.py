"""Megatron's distributed checkpoints without Megatron: theirs is read, ours is what Megatron reads."""

import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from dapo_megatron.checkpoint import raw
from dapo_megatron.checkpoint.distcp import METADATA, Chunk, DistFile, DistReader, serialise, write_metadata
from dapo_megatron.errors import UserError
from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.run_state.store import state_path
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config

MATRIX = torch.arange(48, dtype=torch.float32).view(6, 8)
LAYERS = torch.arange(60, dtype=torch.float32).view(3, 4, 5).to(torch.bfloat16)
WHOLE = {
    "matrix": MATRIX,
    "layers": LAYERS,
    "scalar": torch.tensor(7),
    "fp8": torch.ones(4, 2).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
}
OBJECT = "extra/shard_0_1"
COMMON = {"iteration": 5, "args": SimpleNamespace(hidden=4, dtype=torch.bfloat16)}


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit."""
    described = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return described and bytes(raw.as_bytes(found)) == bytes(raw.as_bytes(expected.contiguous()))


def cuts(key: str, whole: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(offset, part): quarters of the matrix, each layer, the others whole."""
    if key == "matrix":
        for i in (0, 3):
            for j in (0, 4):
                yield (i, j), whole[i : i + 3, j : j + 4]
    elif key == "layers":
        yield from (((i, 0, 0), whole[i : i + 1]) for i in range(3))
    else:
        yield (0,) * whole.dim(), whole


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint of two files, that nothing of Megatron wrote."""
    folder = tmp_path / "ours"
    folder.mkdir()
    chunks = []
    with DistFile(folder, 0) as first, DistFile(folder, 1) as second:
        extra = first.append_object(OBJECT, serialise([{"a": torch.ones(2)}]))
        for key, whole in WHOLE.items():
            for i, (offset, part) in enumerate(cuts(key, whole)):
                chunks.append((first, second)[i % 2].append(key, offset, part))
    described = {key: (tuple(whole.shape), whole.dtype) for key, whole in WHOLE.items()}
    write_metadata(folder, described, reversed(chunks), [extra], COMMON)
    return folder


@pytest.fixture(scope="module")
def theirs(layout: Layout, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a run, as Megatron saves it: model, optimizer, random state. Not to be changed."""
    config = make_config(checkpoint("qwen2"), run={"dir": str(tmp_path_factory.mktemp("run"))})
    state = RunState(config, Policy(config, layout))
    state.step = 1
    state.save()
    return state_path(config.run.dir, 1)


@pytest.mark.usefixtures("layout")
def test_megatron_loads_what_we_write_in_other_cuts(ours: Path) -> None:
    def column(i: int) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets("matrix", torch.zeros(6, 2), (1, i, 4))

    def layer(i: int) -> ShardedTensor:
        empty = torch.zeros(2, 5, dtype=torch.bfloat16)
        return ShardedTensor.from_rank_offsets("layers", empty, (0, i // 2, 3), (1, i % 2, 2), prepend_axis_num=1)

    others = ("scalar", "fp8", "flags")
    wanted: dict[str, Any] = {
        "columns": [column(i) for i in range(4)],
        "layers": [layer(i) for i in range(6)],
        "extra": ShardedObject("extra", None, (1,), (0,)),
        **{key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(WHOLE[key])) for key in others},
    }
    loaded, missing, unexpected = dist_checkpointing.load(wanted, str(ours), strict="return_all")
    assert not missing | unexpected
    assert same(torch.cat(loaded["columns"], 1), MATRIX)
    assert same(torch.cat(loaded["layers"]).view(3, 4, 5), LAYERS)
    assert all(same(loaded[key], WHOLE[key]) for key in others)
    assert torch.equal(loaded["extra"]["a"], torch.ones(2))
    assert {key: loaded[key] for key in COMMON} == COMMON


def test_what_we_write_is_read(ours: Path) -> None:
    reader = DistReader(ours)
    assert reader.tensors == {key: (tuple(whole.shape), whole.dtype) for key, whole in WHOLE.items()}
    assert all(same(reader.read(key), whole) for key, whole in WHOLE.items())
    assert [chunk.offset for chunk in reader.chunks("matrix")] == [(0, 0), (0, 4), (3, 0), (3, 4)]
    assert reader.objects == {OBJECT}
    assert torch.equal(reader.read_object(OBJECT)["a"], torch.ones(2))
    assert reader.object_bytes(OBJECT) == serialise([{"a": torch.ones(2)}])
    assert reader.common() == COMMON


def test_what_megatron_saves_is_read(theirs: Path) -> None:
    reader, expected = DistReader(theirs), dist_checkpointing.load_plain_tensors(str(theirs))
    objects = {key for key, value in expected.items() if not isinstance(value, Tensor)}
    assert expected.keys() - objects == reader.tensors.keys()
    assert any(".exp_avg" in key for key in reader.tensors)
    assert all(len(reader.chunks(key)) == 4 for key in reader.tensors if key.endswith("linear_proj.weight"))
    assert all(same(reader.read(key), expected[key]) for key in reader.tensors)
    assert all(reader.read(key).dtype == dtype for key, (_, dtype) in reader.tensors.items())
    assert set(reader.read_object("random/shard_0_1")) >= {"python", "numpy", "torch"}
    assert reader.common()["scheduler"]["num_steps"] == 0


@pytest.mark.usefixtures("layout")
def test_transposed_tensor_of_megatrons(tmp_path: Path) -> None:
    """Megatron stores the memory as it lies."""
    dist_checkpointing.save({"x": ShardedTensor.from_rank_offsets("x", MATRIX.t())}, str(tmp_path))
    reader = DistReader(tmp_path)
    assert same(reader.read("x"), MATRIX.t())
    assert same(reader.read("x", (2, 1), (5, 3)), MATRIX.t()[2:7, 1:4])


def test_view_of_a_larger_storage(tmp_path: Path) -> None:
    """torch.save writes all of it, with the index at which the view begins."""
    with DistFile(tmp_path, 0) as file:
        chunk = file.append_object("x", serialise(MATRIX[2:4]))
    placed = Chunk("x", (0, 0), (2, 8), chunk.file, chunk.start, chunk.length)
    write_metadata(tmp_path, {"x": ((2, 8), torch.float32)}, [placed])
    assert same(DistReader(tmp_path).read("x", (1, 0), (1, 8)), MATRIX[3:4])


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((0, 0), (6, 8)), ((3, 4), (3, 4)), ((1, 5), (2, 2)), ((2, 0), (1, 8)), ((0, 3), (6, 2)), ((2, 2), (0, 3))],
)
def test_boxes(ours: Path, offset: tuple[int, int], shape: tuple[int, int]) -> None:
    (i, j), (n, m) = offset, shape
    found = DistReader(ours).read("matrix", offset, shape)
    assert same(found, MATRIX[i : i + n, j : j + m])
    assert found.is_contiguous()


def test_box_across_layers(ours: Path) -> None:
    assert same(DistReader(ours).read("layers", (1, 1, 2), (2, 2, 3)), LAYERS[1:, 1:3, 2:])


def test_only_the_chunks_that_meet_the_box_are_read(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = DistReader(ours), []
    into = raw.read_into

    def counted(handle: int, view: memoryview, offset: int) -> None:
        read.append(len(view))
        into(handle, view, offset)

    monkeypatch.setattr(raw, "read_into", counted)
    reader.read("matrix", (4, 2), (2, 4))  # two rows of two chunks, half of each row
    assert read == [24, 24]  # all but what follows the last stretch
    read.clear()
    reader.read("layers", (2, 1, 0), (1, 2, 5))
    assert read == [2 * 5 * 2]


@pytest.mark.parametrize(("offset", "shape"), [((0, 0), (7, 8)), ((-1, 0), (2, 8)), ((0,), (6,)), ((0, 9), (1, 0))])
def test_box_outside_the_tensor(ours: Path, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"holds matrix in shape \(6, 8\): there is no"):
        DistReader(ours).read("matrix", offset, shape)


def test_keys_that_are_not_there(ours: Path) -> None:
    reader = DistReader(ours)
    for ask in (reader.read, reader.chunks, reader.read_object):
        with pytest.raises(UserError, match=f"{ours} has no (tensor|object) nothing"):
            ask("nothing")


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch /tmp/dapo-megatron-was-here",)


def test_hostile_metadata(ours: Path) -> None:
    for hostile in (Hostile(), Metadata({}, planner_data=Hostile(), storage_data={}), Metadata({}, storage_data=open)):
        (ours / METADATA).write_bytes(pickle.dumps(hostile))
        with pytest.raises(UserError, match=r"\.metadata cannot be read: it asks for (posix\.system|io\.open), which"):
            DistReader(ours)


def test_hostile_contents(ours: Path) -> None:
    """Of common.pt, of an object and of a tensor."""
    torch.save(Hostile(), ours / "common.pt")
    described = {"x": ((1,), torch.float32)}
    with DistFile(ours, 2) as file:
        chunk = file.append_object("x", serialise(Hostile()))
        extra = file.append_object(OBJECT, serialise([Hostile()]))
    placed = Chunk("x", (0,), (1,), chunk.file, chunk.start, chunk.length)
    reader = DistReader(ours)
    with pytest.raises(UserError, match=r"common\.pt cannot be read: it asks for posix\.system, which"):
        reader.common()
    write_metadata(ours, described, [placed], [extra])
    reader = DistReader(ours)
    with pytest.raises(UserError, match=rf"{OBJECT} cannot be read: it asks for posix\.system, which"):
        reader.read_object(OBJECT)
    with pytest.raises(UserError, match=r"__2_0\.distcp cannot be read: .* it asks for posix\.system, which"):
        reader.read("x")


def rewrite(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def drop_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def cut_file(folder: Path) -> None:
    (folder / "__1_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes()[:-1])


def drop_place(folder: Path) -> None:
    rewrite(folder, lambda metadata: metadata.storage_data.popitem())


def leave_the_folder(folder: Path) -> None:
    rewrite(folder, lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "../__0_0.distcp"))


def compress(folder: Path) -> None:
    rewrite(folder, lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["zstd"]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "metadata.json").unlink(), "is no Megatron distributed checkpoint"),
        (lambda folder: (folder / "metadata.json").write_text("{}"), r"metadata\.json cannot be read"),
        (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "states the format zarr"),
        (lambda folder: (folder / METADATA).unlink(), r"\.metadata cannot be read: .*No such file"),
        (lambda folder: (folder / METADATA).write_bytes(b""), r"\.metadata cannot be read"),
        (lambda folder: (folder / METADATA).write_bytes(pickle.dumps([])), r"\.metadata cannot be read"),
        (drop_place, r"\.metadata cannot be read"),
        (leave_the_folder, "which is no file of the folder"),
        (compress, "stored with .*zstd"),
        (drop_file, r"__1_0\.distcp is missing"),
        (cut_file, r"__1_0\.distcp is truncated"),
    ],
)
def test_damaged_checkpoint(ours: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(ours)
    with pytest.raises(UserError, match=f"^{ours}.*{message}"):
        DistReader(ours)


def test_damaged_common_part(ours: Path) -> None:
    for damage in ((ours / "common.pt").unlink, lambda: (ours / "common.pt").write_bytes(b"no zip")):
        damage()
        with pytest.raises(UserError, match=rf"{ours}/common\.pt cannot be read"):
            DistReader(ours).common()


def test_parts_that_no_chunk_holds(ours: Path) -> None:
    """The whole is not there; what lies in the other chunks is."""
    rewrite(ours, lambda metadata: metadata.state_dict_metadata["matrix"].chunks.pop(1))
    reader = DistReader(ours)
    for offset, shape in (((0, 0), (6, 8)), ((2, 3), (1, 2)), ((0, 4), (3, 4))):
        with pytest.raises(UserError, match=r"leaves parts of .* of matrix without bytes"):
            reader.read("matrix", offset, shape)
    assert same(reader.read("matrix", (3, 0), (3, 8)), MATRIX[3:])


@pytest.mark.parametrize("position", [0, 40, -30])
def test_damaged_chunk(ours: Path, position: int) -> None:
    """In its first record, in the pickle, in the directory at its end."""
    chunk = DistReader(ours).chunks("fp8")[0]
    with (ours / chunk.file).open("r+b") as file:
        file.seek(chunk.start + position % chunk.length)
        file.write(b"\xff" * 30)
    with pytest.raises(UserError, match=rf"{chunk.file} cannot be read: it is not as torch\.save writes"):
        DistReader(ours).read("fp8")


def test_compressed_chunk(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(serialise(torch.ones(9)))) as plain, zipfile.ZipFile(content, "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with DistFile(tmp_path, 0) as file:
        chunk = file.append_object("x", content.getvalue())
    placed = Chunk("x", (0,), (9,), chunk.file, chunk.start, chunk.length)
    write_metadata(tmp_path, {"x": ((9,), torch.float32)}, [placed])
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read: it is compressed"):
        DistReader(tmp_path).read("x")


@pytest.mark.parametrize("key", ["flags", "layers"])
def test_chunk_that_is_not_as_the_metadata_says(ours: Path, key: str) -> None:
    """Another dtype, another shape."""
    reader = DistReader(ours)
    wrong = {"flags": ((3,), torch.int8), "layers": ((3, 5, 4), torch.bfloat16)}[key]
    placed = [
        Chunk(key, c.offset, (*c.shape[:-2], *reversed(c.shape[-2:])), c.file, c.start, c.length)
        for c in reader.chunks(key)
    ]
    write_metadata(ours, {key: wrong}, placed)
    with pytest.raises(UserError, match=rf"{key} has torch\.\w+ \(.*\) there, \.metadata states torch\.\w+ \("):
        DistReader(ours).read(key)


def test_file_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    with DistFile(tmp_path, 3, 2) as file:
        first = file.append("a", (0,), torch.ones(4))
        file.append("lost", (0,), torch.ones(400))
        file.flush()
    with DistFile(tmp_path, 3, 2) as file:
        assert file.length == (tmp_path / "__3_2.distcp").stat().st_size > first.length
        file.truncate(first.start + first.length)
        second = file.append("b", (0,), torch.zeros(3))
        with pytest.raises(UserError, match=r"__3_2\.distcp has \d+ bytes, 100000 were written"):
            file.truncate(100000)
    assert (first.file, second.start) == ("__3_2.distcp", first.length)
    write_metadata(tmp_path, {"a": ((4,), torch.float32), "b": ((3,), torch.float32)}, [first, second])
    reader = DistReader(tmp_path)
    assert same(reader.read("a"), torch.ones(4))
    assert same(reader.read("b"), torch.zeros(3))
    assert reader.common() == {}


def test_view_takes_no_more_room_than_its_elements(tmp_path: Path) -> None:
    with DistFile(tmp_path, 0) as file:
        chunk = file.append("x", (0,), torch.ones(100_000)[10:12])
        assert chunk.length == file.length < 3000
        with pytest.raises(ValueError, match="cannot lie at"):
            file.append("x", (0, 0), torch.ones(2))


def test_checksums_are_left_out_of_our_files_alone(tmp_path: Path) -> None:
    with DistFile(tmp_path, 0) as file:
        file.append("x", (0,), torch.ones(2))
    assert torch.serialization.get_crc32_options()


def test_full_disk(tmp_path: Path) -> None:
    """What was written of a chunk goes again; torch's own writer survives."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DistFile(tmp_path, 0) as file:
        kept = file.append("x", (0,), torch.ones(4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, unlimited[1]))
        try:
            for write in (
                lambda: file.append("y", (0,), torch.ones(1 << 16)),
                lambda: file.append_object("y", bytes(1 << 17)),
            ):
                with pytest.raises(UserError, match=r"__0_0\.distcp cannot be written, disk full"):
                    write()
                assert file.length == kept.length == file.path.stat().st_size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        again = file.append("y", (0,), torch.ones(1 << 16))
    write_metadata(tmp_path, {"x": ((4,), torch.float32), "y": ((1 << 16,), torch.float32)}, [kept, again])
    assert same(DistReader(tmp_path).read("y"), torch.ones(1 << 16))


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [((0, 0), (2, 3))],
        [((0, 0), (2, 3)), ((0, 0), (2, 3))],
        [((0, 0), (2, 3)), ((3, 0), (2, 3))],
        [((0, 0), (4,))],
        [((0,), (4, 3))],
    ],
)
def test_chunks_that_make_no_tensor(tmp_path: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    chunks = [Chunk("x", offset, shape, "__0_0.distcp", 0, 10) for offset, shape in boxes]
    with pytest.raises(ValueError, match=r"^x: "):
        write_metadata(tmp_path, {"x": ((4, 3), torch.float32)}, chunks)
    assert list(tmp_path.iterdir()) == []


def test_folder_of_hugging_face_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"is no Megatron distributed checkpoint: it has no metadata\.json"):
        DistReader(checkpoint("qwen2"))
