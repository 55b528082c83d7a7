"""Hugging Face checkpoints on disk: reading stretches, writing whole ones, and damaged folders."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.checkpoint import INDEX, SINGLE
from dapo_megatron.checkpoint.hf import HFReader, write_hf
from dapo_megatron.errors import UserError

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b.weight": torch.arange(6, dtype=torch.float32).view(2, 3) / 7,
    "c.bias": torch.tensor([0.1, 0.2], dtype=torch.float32),
}


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
    write_hf(folder, template(tmp_path / "of-sharded"), TENSORS.items(), max_shard_bytes=100)
    return folder


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reader_gives_whole_tensors_and_stretches(kind: str, request: pytest.FixtureRequest) -> None:
    reader = HFReader(request.getfixturevalue(kind))
    for name, tensor in TENSORS.items():
        assert torch.equal(reader(name), tensor)
        assert reader.shape(name) == tuple(tensor.shape)
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


def test_tensor_that_the_checkpoint_lacks(single: Path) -> None:
    with pytest.raises(UserError, match=f"{single} has no tensor d"):
        HFReader(single)("d")


def test_shard_that_is_not_there(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    reader = HFReader(sharded)
    reader("a.weight")
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        reader("b.weight")


@pytest.mark.parametrize("size", [0, 4, 60, 150])
def test_truncated_file(single: Path, size: int) -> None:
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=f"{SINGLE} cannot be read"):
        HFReader(single)


def test_index_that_names_a_file_without_the_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["c.bias"] = index["weight_map"]["a.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"c\.bias"):
        HFReader(sharded)("c.bias")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_index_that_is_damaged(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(UserError, match=INDEX):
        HFReader(sharded)


def test_written_checkpoint_is_byte_exact(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_hf(folder, template(tmp_path / "template"), TENSORS.items())
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
    write_hf(tmp_path / "out", template(tmp_path / "template"), TENSORS.items(), max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(TENSORS)


@pytest.mark.parametrize(("key", "other"), [("dtype", "torch_dtype"), ("torch_dtype", "dtype")])
def test_config_states_the_dtype_written(tmp_path: Path, key: str, other: str) -> None:
    source = template(tmp_path / "template")
    (source / "config.json").write_text(json.dumps({"hidden_size": 2, key: "float64"}))
    write_hf(tmp_path / "out", source, [("x", torch.ones(2, dtype=torch.bfloat16))])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"hidden_size": 2, key: "bfloat16"}
    assert other not in config


def test_older_checkpoint_is_replaced(tmp_path: Path) -> None:
    folder, source = tmp_path / "out", template(tmp_path / "template")
    write_hf(folder, source, TENSORS.items(), max_shard_bytes=100)
    write_hf(folder, source, [("only", torch.ones(1))])
    assert list(load_file(folder / SINGLE)) == ["only"]
    assert not (folder / INDEX).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]


def test_crash_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    folder, source = tmp_path / "out", template(tmp_path / "template")
    write_hf(folder, source, TENSORS.items())

    def crashing() -> Iterator[tuple[str, Tensor]]:
        yield "a.weight", torch.zeros(4, 6)
        yield "b.weight", torch.zeros(2, 3)
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        write_hf(folder, source, crashing(), max_shard_bytes=1)
    assert torch.equal(HFReader(folder)("a.weight"), TENSORS["a.weight"])
    write_hf(folder, source, [("after", torch.ones(1))])  # what the crash left is no obstacle
    assert list(load_file(folder / SINGLE)) == ["after"]
    assert not (tmp_path / "out.incomplete").exists()


def test_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tensors"):
        write_hf(tmp_path / "out", template(tmp_path / "template"), [])
