"""Hugging Face checkpoints on disk: reading stretches, writing whole ones, and damaged folders."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.checkpoint import INDEX, SINGLE
from dapo_megatron.checkpoint.hf import HFReader, HFWriter, write_hf
from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.errors import UserError

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b.weight": torch.arange(6, dtype=torch.float32).view(2, 3) / 7,
    "c.bias": torch.tensor([0.1, 0.2], dtype=torch.float32),
}


def entries_of(tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
    return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


ENTRIES = entries_of(TENSORS.items())
ONLY = [("only", torch.ones(1, dtype=torch.bfloat16))]


def template(folder: Path) -> Path:
    """Everything of a checkpoint but its weights, and one stale weight file."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "dtype": "float64"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    save_file({"stale": torch.zeros(1)}, folder / "model-00001-of-00009.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"stale": "model-00001-of-00009.safetensors"}}')
    return folder


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(TENSORS, folder / SINGLE)
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    write_hf(folder, template(tmp_path / "of-sharded"), TENSORS.items(), ENTRIES, max_shard_bytes=100)
    return folder


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reader_gives_whole_tensors_and_stretches(kind: str, request: pytest.FixtureRequest) -> None:
    reader = HFReader(request.getfixturevalue(kind))
    for name, tensor in TENSORS.items():
        assert torch.equal(reader(name), tensor)
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), torch.float32)
    assert sorted(reader.names()) == list(TENSORS)
    whole = TENSORS["a.weight"]
    for found, expected in (
        (reader("a.weight", 0, 1, 3), whole[1:3]),
        (reader("a.weight", 1, 2, 5), whole[:, 2:5]),
        (reader("a.weight", 0, 4, 4), whole[4:]),
        (reader("c.bias", 0, 1, 2), TENSORS["c.bias"][1:]),
    ):
        assert torch.equal(found, expected)
        assert found.is_contiguous()  # Megatron views master weights as flat


def test_reader_keeps_the_dtype_of_the_file(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    assert HFReader(tmp_path)("x", 1, 0, 1).dtype == torch.bfloat16


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has neither {SINGLE} nor {INDEX}"):
        HFReader(tmp_path)


@pytest.mark.parametrize("ask", [HFReader.shape, HFReader.dtype, HFReader.__call__])
def test_stretch_or_tensor_that_is_not_there(single: Path, ask: Callable[[HFReader, str], object]) -> None:
    reader = HFReader(single)
    with pytest.raises(UserError, match=f"^model.path: {single} has no tensor d$"):
        ask(reader, "d")
    with pytest.raises(UserError, match=rf"^model.path: {single}/{SINGLE} holds a\.weight in shape \[4, 6\]"):
        reader("a.weight", 1, 2, 7)


def test_shard_that_is_not_there(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"^model.path: .*model-00002-of-00002\.safetensors cannot be read"):
        HFReader(sharded)


def test_truncated_file(single: Path) -> None:
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"^model.path: {path} cannot be read"):
        HFReader(single)


def test_index_and_files_that_differ(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    first, second = (sharded / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    placed = index["weight_map"]["c.bias"]
    index["weight_map"]["c.bias"] = first.name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"{first} lacks c\.bias, which {INDEX} places there"):
        HFReader(sharded)
    del index["weight_map"]["c.bias"]
    (sharded / INDEX).write_text(json.dumps(index))
    assert placed == second.name
    with pytest.raises(UserError, match=rf"{second} holds c\.bias, which {INDEX} does not place there"):
        HFReader(sharded)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../a"}}'])
def test_index_that_is_damaged(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(UserError, match=INDEX):
        HFReader(sharded)


def test_written_checkpoint_is_byte_exact(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_hf(folder, template(tmp_path / "template"), TENSORS.items(), ENTRIES)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        SINGLE,
        "tokenizer.json",
    ]
    found = load_file(folder / SINGLE)
    assert found.keys() == TENSORS.keys()
    assert all(found[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in TENSORS.items())


def test_written_shards_have_an_index(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {"a.weight": first, "b.weight": second, "c.bias": second}
    assert index["metadata"]["total_size"] == 96 + 24 + 8
    assert not (sharded / SINGLE).exists()
    assert not (sharded / "model-00001-of-00009.safetensors").exists()


def test_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    write_hf(tmp_path / "out", template(tmp_path / "template"), TENSORS.items(), ENTRIES, max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(TENSORS)


@pytest.mark.parametrize(("key", "other"), [("dtype", "torch_dtype"), ("torch_dtype", "dtype")])
def test_config_states_the_dtype_written(tmp_path: Path, key: str, other: str) -> None:
    source = template(tmp_path / "template")
    (source / "config.json").write_text(json.dumps({"hidden_size": 2, key: "float64", "quantization_config": {}}))
    write_hf(tmp_path / "out", source, ONLY, entries_of(ONLY))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"hidden_size": 2, key: "bfloat16"}  # a quantised template's weights are not what was written
    assert other not in config


def test_config_of_quantised_weights_says_so(tmp_path: Path) -> None:
    source = template(tmp_path / "template")
    (source / "config.json").write_text(json.dumps({"quantization_config": {"bits": 8}}))
    tensors = [("scale", torch.ones(1)), ("x", torch.ones(2).to(torch.float8_e4m3fn))]
    write_hf(tmp_path / "out", source, tensors, entries_of(tensors))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": "float32", "quantization_config": {"bits": 8}}


@pytest.mark.parametrize("content", [None, "", "[]"])
def test_template_without_a_config(tmp_path: Path, content: str | None) -> None:
    source = template(tmp_path / "template")
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{source}/config.json cannot be read"):
        write_hf(tmp_path / "out", source, ONLY, entries_of(ONLY))
    assert not (tmp_path / "out").exists()


def test_nothing_of_other_formats_is_copied(tmp_path: Path) -> None:
    """The template may be a Megatron checkpoint that carries its tokenizer."""
    source = template(tmp_path / "template")
    for name in (
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pth", "consolidated.00.pt", "model.gguf"),
        *("__0_0.distcp", ".metadata", "common.pt", "metadata.json", "manifest.json", "run.json", "tensors.json"),
        *("tokenizer.json.incomplete",),
    ):
        (source / name).touch()
    (source / "original").mkdir()
    (source / "chat_template.jinja").touch()
    write_hf(tmp_path / "out", source, ONLY, entries_of(ONLY))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", SINGLE),
    }


def test_older_checkpoint_is_replaced(tmp_path: Path) -> None:
    folder, source = tmp_path / "out", template(tmp_path / "template")
    write_hf(folder, source, TENSORS.items(), ENTRIES, max_shard_bytes=100)
    write_hf(folder, source, ONLY, entries_of(ONLY))
    assert list(load_file(folder / SINGLE)) == ["only"]
    assert not (folder / INDEX).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]


def test_crash_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    folder, source = tmp_path / "out", template(tmp_path / "template")
    write_hf(folder, source, TENSORS.items(), ENTRIES)

    def crashing() -> Iterator[tuple[str, Tensor]]:
        yield "a.weight", torch.zeros(4, 6)
        yield "b.weight", torch.zeros(2, 3)
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        write_hf(folder, source, crashing(), ENTRIES, max_shard_bytes=1)
    assert torch.equal(HFReader(folder)("a.weight"), TENSORS["a.weight"])
    write_hf(folder, source, ONLY, entries_of(ONLY))  # what the crash left is no obstacle
    assert list(load_file(folder / SINGLE)) == ["only"]
    assert not (tmp_path / "out.incomplete").exists()


def test_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tensors"):
        write_hf(tmp_path / "out", template(tmp_path / "template"), [], [])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (list(TENSORS.items())[:2], r"1 tensors were planned and not written, among them c\.bias"),
        ([("d", torch.ones(2))], "the plan has None"),
        ([("c.bias", torch.ones(3))], r"is to be written, the plan has Entry\(name='c\.bias'"),
        ([("c.bias", torch.ones(2).double())], "is to be written, the plan has"),
    ],
)
def test_tensors_that_are_not_those_planned(tmp_path: Path, tensors: list[tuple[str, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_hf(tmp_path / "out", template(tmp_path / "template"), tensors, ENTRIES)
    assert not (tmp_path / "out").exists()


def test_entry_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="given twice"):
        HFWriter(tmp_path, [*ENTRIES, ENTRIES[0]])


def test_many_writers_in_any_order_write_one_checkpoint(tmp_path: Path, sharded: Path) -> None:
    """What processes write, each with a writer of its own, is what one pass writes."""
    writers = [HFWriter(tmp_path / "out", ENTRIES, max_shard_bytes=100) for _ in range(3)]
    writers[0].create()
    for writer, (name, tensor) in zip(writers, reversed(TENSORS.items()), strict=True):
        writer.write(name, tensor)
        writer.flush()
    writers[1].finish(tmp_path / "of-sharded", torch.float32)
    names = {path.name for path in sharded.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert all((tmp_path / "out" / name).read_bytes() == (sharded / name).read_bytes() for name in names)


def test_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    """Files of the same layout keep what they hold, others are made anew or removed."""
    folder = tmp_path / "out"
    writer = HFWriter(folder, ENTRIES, max_shard_bytes=100)
    writer.create()
    writer.write("a.weight", TENSORS["a.weight"])
    writer.write("c.bias", TENSORS["c.bias"])
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])

    again = HFWriter(folder, ENTRIES, max_shard_bytes=100)
    again.create()
    assert torch.equal(load_file(folder / "model-00001-of-00002.safetensors")["a.weight"], TENSORS["a.weight"])
    assert torch.equal(load_file(second)["c.bias"], torch.zeros(2))

    other = [Entry("z.weight", torch.float32, (4, 6)), *ENTRIES[1:]]
    HFWriter(folder, other, max_shard_bytes=100).create()
    assert list(load_file(folder / "model-00001-of-00002.safetensors")) == ["z.weight"]
    HFWriter(folder, ENTRIES).create()
    assert [path.name for path in folder.glob("model*.safetensors")] == [SINGLE]


def test_whole_checkpoint_after_a_sharded_one_has_no_index(tmp_path: Path) -> None:
    folder, source = tmp_path / "out", template(tmp_path / "template")
    for size in (100, 1000):
        writer = HFWriter(folder, ENTRIES, max_shard_bytes=size)
        writer.create()
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        writer.finish(source, torch.float32)
    assert not (folder / INDEX).exists()
    assert sorted(HFReader(folder).names()) == list(TENSORS)


def test_full_disk_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    """The room is reserved before the first tensor is made."""
    entries = [*ENTRIES, Entry("huge", torch.float32, (1 << 58,))]

    def asked() -> Iterator[tuple[str, Tensor]]:
        pytest.fail("a tensor was asked for")
        yield  # a generator

    with pytest.raises(UserError, match="disk full"):
        write_hf(tmp_path / "out", template(tmp_path / "template"), asked(), entries)
    assert not (tmp_path / "out").exists()
