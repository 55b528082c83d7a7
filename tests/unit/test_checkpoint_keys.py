"""What conversions write is what megatron-core itself writes and loads, not only the inverse of what they read."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from dapo_megatron.checkpoint.compare import differences
from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer.build import PolicyModel, build_model, load_weights
from dapo_megatron.trainer.parallel import Layout
from tests.checkpoints import files_of
from tests.models import TINY_FAMILIES

ONE_RANK = ParallelConfig.model_validate({})


def loaded_model(hf: Path) -> PolicyModel:
    """A model of one rank with the weights of a Hugging Face folder, as the trainer reads them."""
    training = TrainingConfig.model_validate({"precision": "fp32"})
    (chunk,) = build_model(architecture_of(hf), ONE_RANK, training, temperature=1.0)
    load_weights(chunk, HFReader(hf))
    return chunk


def weights(model: PolicyModel) -> dict[str, Tensor]:
    """Parameters, and the buffers that a checkpoint holds."""
    kept = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return dict(model.named_parameters()) | kept


def stored(folder: Path) -> dict[str, Any]:
    """What lies where: (shape, dtype) of each tensor and the boxes that it is cut into."""
    reader = DistReader(folder)
    return {key: (*of, [(c.offset, c.shape) for c in reader.chunks(key)]) for key, of in reader.tensors.items()}


# Modules that keep an extra state in Transformer Engine alone, where these norms are not fused into what follows.
OF_TE = {"final_layernorm", "core_attention"}
OF_TE_TOO = {
    "Qwen3ForCausalLM": {"q_layernorm", "k_layernorm"},
    "Qwen3MoeForCausalLM": {"q_layernorm", "k_layernorm", "pre_mlp_layernorm"},
    "MixtralForCausalLM": {"pre_mlp_layernorm"},
    "DeepseekV3ForCausalLM": {"input_layernorm", "pre_mlp_layernorm"},
}


def only_of_te(objects: set[str]) -> bool:
    """Whether extra states are of modules that keep some in Transformer Engine alone."""
    return all(re.search(r"(norm|core_attention)\._extra_state(/shard_[\d._]+)?$", key) for key in objects)


MODELS = [(family, family in ("llama", "gemma")) for family in TINY_FAMILIES] + [("qwen2", True)]


@pytest.fixture(params=MODELS, ids=lambda model: f"{model[0]}-{'tied' if model[1] else 'untied'}")
def hf(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    family, tied = request.param
    return checkpoint(family, tied=tied)


def test_megatron_loads_a_conversion(hf: Path, layout: Layout, tmp_path: Path) -> None:
    """Strictly: nothing is missing, extra states included, and every parameter is the one that the trainer loads."""
    hf_to_megatron(hf, tmp_path / "megatron", ONE_RANK)
    model, empty = loaded_model(hf), loaded_model(hf)
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(-7)
    found, too_much, missing = dist_checkpointing.load(
        empty.sharded_state_dict(), str(tmp_path / "megatron"), strict="return_all"
    )
    assert not missing
    assert only_of_te(too_much)
    empty.load_state_dict(found)
    expected, ours = weights(model), weights(empty)
    assert len(ours) >= len(list(empty.parameters()))
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])] == []


def test_conversion_lies_as_megatron_saves(hf: Path, layout: Layout, tmp_path: Path) -> None:
    """The same keys, shapes, dtypes, boxes and extra states; what megatron-core saves is read, and exported."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hf_to_megatron(hf, ours, ONE_RANK)
    shutil.copytree(hf, theirs, ignore=shutil.ignore_patterns("*.safetensors"))
    dist_checkpointing.save(loaded_model(hf).sharded_state_dict(), str(theirs))
    assert stored(ours) == stored(theirs)
    objects, saved = DistReader(ours).objects, DistReader(theirs).objects
    assert saved <= objects
    modules = {key.partition("._extra_state")[0].rpartition(".")[2] for key in objects - saved}
    assert modules == OF_TE | OF_TE_TOO.get(architecture_of(hf).hf_class, set())
    assert not list(differences(hf, theirs))
    megatron_to_hf(theirs, tmp_path / "back")
    assert files_of(tmp_path / "back", "tensors.json") == files_of(hf)
