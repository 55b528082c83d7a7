"""Law 2: Hugging Face to Megatron in any layout and back is exact, byte by byte, names and index included."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from torch import Tensor

from dapo_megatron.checkpoint import dist_writer
from dapo_megatron.checkpoint.compare import differences, verify_folder
from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.checkpoint.dist_writer import MegatronWriter
from dapo_megatron.checkpoint.distcp import Chunk, DistReader
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.manifest import read_manifest
from dapo_megatron.checkpoint.reshard import reshard
from dapo_megatron.checkpoint.source import HFSource
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.checkpoint_keys import stored_parameter
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.models.sharding import load_shard, merge_shards
from tests.checkpoints import (
    digests,
    files_of,
    legal_layouts,
    load_tensors,
    random_checkpoint,
    save_tensors,
)
from tests.models import TINY_FAMILIES

FAMILIES = [family for family in TINY_FAMILIES if family != "llama3"]  # its tensors are llama's
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v3_plain")
MANIFEST = "tensors.json"


def layout(**sizes: Any) -> ParallelConfig:
    return ParallelConfig.model_validate(sizes | {"sequence": sizes.get("tensor", 1) > 1})


# The hardest of both kinds: everything at once, uneven stages, chunks in turns.
DENSE_LAYOUTS = [
    layout(tensor=4, pipeline=2, virtual_pipeline=2),
    layout(tensor=2, pipeline=3, pipeline_layers=[1, 2, 1]),
]
EXPERT_LAYOUTS = [
    layout(tensor=2, pipeline=2, virtual_pipeline=2, expert=4, expert_tensor=2),
    layout(tensor=4, pipeline=3, pipeline_layers=[1, 2, 1], expert=2, expert_tensor=2),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random checkpoint of a family, DeepSeek's with layers for multi-token prediction. Made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            own: dict[str, Any] = {"num_nextn_predict_layers": 1} if family.startswith("deepseek") else {}
            own |= {"tied": family in ("qwen2", "gemma")}
            made[family] = random_checkpoint(tmp_path_factory.mktemp(family), family, **own)
        return made[family]

    return make


class Shelf(MegatronWriter):
    """Keeps in memory what each rank of a layout holds of a parameter, in place of files."""

    def __init__(self, source: HFSource, parallel: ParallelConfig) -> None:
        super().__init__(Path(), source.arch, parallel, 0)
        self.held: dict[int, list[tuple[tuple[int, ...], Tensor]]] = {}

    def _file(self, rank: int) -> Any:
        return _Place(self.held.setdefault(rank, []))


class _Place:
    def __init__(self, held: list[tuple[tuple[int, ...], Tensor]]) -> None:
        self.held = held

    def append(self, key: str, offset: tuple[int, ...], tensor: Tensor) -> Chunk:
        self.held.append((offset, tensor))
        return Chunk(key, offset, tuple(tensor.shape), "", 0, 0)


@dataclass
class Held:
    """Tensors in memory as a `models.sharding.Reader`."""

    tensors: dict[str, Tensor]

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        return self.tensors[name] if dim is None else self.tensors[name].narrow(dim, start, stop - start)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_legal_layout(family: str, model: Callable[..., Path]) -> None:
    """The shards of all ranks are those that the trainer's ranks load, and make up the tensors again."""
    source = HFSource(model(family))
    parameters = [Whole(item.row, *source.read(item)) for item in source.items()]
    layouts = list(legal_layouts(source.arch))
    assert len(layouts) == (90 if family in EXPERTS else 15)
    for parallel in layouts:
        boxes: list[tuple[str, tuple[int, ...]]] = []
        for item, parameter in zip(source.items(), parameters, strict=True):
            shelf = Shelf(source, parallel)
            boxes += [(chunk.key, chunk.offset) for chunk in shelf.write(item, parameter.whole)]
            assert set(shelf.held) <= set(range(shelf.placement.num_ranks))
            check_shards(shelf, parameter)
        assert len(set(boxes)) == len(boxes)  # none lies where another does


class Whole:
    """A parameter, which makes up the tensors that it was read from, and the shards of it that ranks load."""

    def __init__(self, row: Parameter, whole: Tensor, tensors: list[Tensor]) -> None:
        self.row, self.whole = row, whole
        assert all(torch.equal(a, b) for a, b in zip(merge_shards(row.rule, [whole]), tensors, strict=True))
        self._reader = Held(dict(zip(row.hf_names, tensors, strict=True)))
        self._loaded: dict[int, list[Tensor]] = {}

    def loaded(self, ranks: int) -> list[Tensor]:
        """The shards where it is split over so many ranks."""
        if ranks not in self._loaded:
            self._loaded[ranks] = [
                load_shard(self.row.rule, self._reader, self.row.hf_names, i, ranks) for i in range(ranks)
            ]
        return self._loaded[ranks]


def check_shards(shelf: Shelf, parameter: Whole) -> None:
    row, rule = parameter.row, parameter.row.rule
    stored, ranks = stored_parameter(row, shelf.arch), shelf.placement.shards(row).ranks
    stacked = len(stored.index)
    padded = torch.full(rule.padded_shape(len(ranks)), torch.nan)
    for rank, loaded in zip(ranks, parameter.loaded(len(ranks)), strict=True):
        parts = [tensor.view(tensor.shape[stacked:]) for _, tensor in shelf.held[rank]]
        assert torch.equal(torch.cat(parts, rule.dim), loaded)
        for (offset, _), part in zip(shelf.held[rank], parts, strict=True):
            assert offset[:stacked] == stored.index
            padded[tuple(slice(o, o + n) for o, n in zip(offset[stacked:], part.shape, strict=True))] = part
    whole, padding = padded.split([rule.shape[rule.dim], padded.shape[rule.dim] - rule.shape[rule.dim]], rule.dim)
    assert not padding.any()
    assert torch.equal(whole, parameter.whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_files(family: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """The folder that comes back is the same in every byte; so is the manifest, in every layout and in both forms."""
    hf = model(family)
    before, expected = files_of(hf), digests(load_tensors(hf))
    for i, parallel in enumerate(EXPERT_LAYOUTS if family in EXPERTS else DENSE_LAYOUTS):
        megatron, back = tmp_path / f"megatron {i}", tmp_path / f"back {i}"
        hf_to_megatron(hf, megatron, parallel)
        megatron_to_hf(megatron, back)
        assert files_of(back, MANIFEST) == before
        for folder in (megatron, back):
            found = read_manifest(folder).tensors
            assert {name: (r.shape, r.dtype, r.sha256) for name, r in found.items()} == expected
        assert verify_folder(megatron) == verify_folder(back) == len(expected)
        assert not list(differences(hf, megatron))
    assert files_of(hf) == before
    assert not list(tmp_path.glob("*.incomplete"))


FORMS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "bf16": {"dtype": torch.bfloat16},
    "padded vocabulary": {"vocab": 151},
    "vocabulary of 5": {"vocab": 5},  # of 4 ranks, the last has padding alone
    "whole vocabulary": {"vocab": 152},
    "shards": {"shards": 3, "tied": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_model(form: str, tmp_path: Path) -> None:
    hf = random_checkpoint(tmp_path / "hf", "qwen2", **FORMS[form])
    vocab = FORMS[form].get("vocab", 151)
    hf_to_megatron(hf, tmp_path / "megatron", layout(tensor=4, pipeline=2))
    shape, dtype = DistReader(tmp_path / "megatron").tensors["embedding.word_embeddings.weight"]
    assert (shape, dtype) == ((-(-vocab // 4) * 4, 32), FORMS[form].get("dtype", torch.float32))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert digests(load_tensors(tmp_path / "back")) == digests(load_tensors(hf))
    if "shards" not in FORMS[form]:
        assert files_of(tmp_path / "back", MANIFEST) == files_of(hf)


def test_shards_of_limited_size_have_an_index(model: Callable[..., Path], tmp_path: Path) -> None:
    hf = model("qwen3_moe")
    hf_to_megatron(hf, tmp_path / "megatron", layout())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=30_000)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 30_000 + 10_000 for file in files)
    assert digests(load_tensors(tmp_path / "back")) == digests(load_tensors(hf))
    assert set(HFReader(tmp_path / "back").names()) == set(load_tensors(hf))


def test_copies_and_computed_buffers(tmp_path: Path) -> None:
    """An output layer stored beside tied embeddings comes back; buffers that every library computes do not."""
    hf = random_checkpoint(tmp_path / "hf", "qwen2", tied=True)
    tensors = load_tensors(hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_tensors(hf, tensors)
    expected = files_of(hf)
    save_tensors(hf, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, shards=2)
    hf_to_megatron(hf, tmp_path / "one", layout(tensor=2))
    reshard(tmp_path / "one", tmp_path / "megatron", layout(pipeline=2))
    assert "output_layer.weight" not in DistReader(tmp_path / "megatron").tensors
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert files_of(tmp_path / "back", MANIFEST) == expected
    for folder in ("one", "megatron", "back"):
        verify_folder(tmp_path / folder)
        assert not list(differences(hf, tmp_path / folder))


@pytest.mark.parametrize("way", ["convert", "export"])
def test_other_dtype(way: str, tmp_path: Path) -> None:
    """Weights are rounded; the bias of a router stays fp32, as Megatron and transformers keep it."""
    hf = random_checkpoint(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=1)
    to = {way: torch.bfloat16}
    hf_to_megatron(hf, tmp_path / "megatron", layout(tensor=2), dtype=to.get("convert"))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype=to.get("export"))
    expected = {
        name: tensor if name.endswith("_bias") else tensor.to(torch.bfloat16)
        for name, tensor in load_tensors(hf).items()
    }
    assert digests(load_tensors(tmp_path / "back")) == digests(expected)
    assert '"dtype": "bfloat16"' in (tmp_path / "back" / "config.json").read_text()
    verify_folder(tmp_path / "back")


def test_reader_of_a_megatron_checkpoint(model: Callable[..., Path], tmp_path: Path) -> None:
    """Whole tensors and stretches, under Hugging Face's names, as `HFReader` gives them."""
    hf = model("deepseek_v3")
    hf_to_megatron(hf, tmp_path / "megatron", EXPERT_LAYOUTS[0])
    ours, theirs = open_weights(tmp_path / "megatron"), HFReader(hf)
    assert set(ours.names()) == set(theirs.names())
    for name in reversed(theirs.names()):
        shape = theirs.shape(name)
        assert (ours.shape(name), ours.dtype(name)) == (shape, theirs.dtype(name))
        assert torch.equal(ours(name), theirs(name))
        for dim, size in enumerate(shape):
            found = ours(name, dim, size // 3, size - 1)
            assert found.is_contiguous()
            assert torch.equal(found, theirs(name, dim, size // 3, size - 1))


def test_reshard_keeps_the_manifest(model: Callable[..., Path], tmp_path: Path) -> None:
    hf = model("qwen3_moe")
    hf_to_megatron(hf, tmp_path / "a", EXPERT_LAYOUTS[0])
    reshard(tmp_path / "a", tmp_path / "b", EXPERT_LAYOUTS[1])
    hf_to_megatron(hf, tmp_path / "c", EXPERT_LAYOUTS[1])
    assert files_of(tmp_path / "b") == files_of(tmp_path / "c")
    first, second = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    assert first.tensors == second.tensors
    assert second.layout["expert_tensor"] == 2
    assert first.layout != second.layout


def test_few_files_are_open_at_once(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout may have more ranks than a process may have open files."""
    hf, parallel = model("qwen3_moe"), EXPERT_LAYOUTS[0]
    hf_to_megatron(hf, tmp_path / "many", parallel)
    monkeypatch.setattr(dist_writer, "_OPEN_FILES", 3)
    hf_to_megatron(hf, tmp_path / "few", parallel)
    assert files_of(tmp_path / "few") == files_of(tmp_path / "many")
