"""Coordinates, layers and parameters of ranks, against Megatron's own and against the table of parameters."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import EMBEDDING, Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.sharding import load_shard
from dapo_megatron.models.table import hf_shapes, parameter_table
from dapo_megatron.planning.ranks import RankPlace, parameters_held, rank_places
from dapo_megatron.trainer import device

LAYERS = 8
LAYOUTS = [
    (ParallelConfig(), 1),
    (ParallelConfig(tensor=2, pipeline=2), 16),
    (ParallelConfig(tensor=2, context=2, pipeline=2, virtual_pipeline=2), 16),
    (ParallelConfig(tensor=4, sequence=True, context=2, expert=4, expert_tensor=2, pipeline=2), 32),
    (ParallelConfig(tensor=2, sequence=True, expert=8, pipeline=4, virtual_pipeline=2), 64),
]
NAMES = [f"tp{p.tensor}-cp{p.context}-ep{p.expert}-etp{p.expert_tensor}-pp{p.pipeline}" for p, _ in LAYOUTS]


@pytest.mark.parametrize(("parallel", "ranks"), LAYOUTS, ids=NAMES)
def test_coordinates_are_those_of_megatron(parallel: ParallelConfig, ranks: int) -> None:
    """Every group that Megatron forms along an axis counts that axis from 0 to its size."""
    device.import_megatron()
    from megatron.core.parallel_state import RankGenerator

    places = rank_places(parallel, ranks, LAYERS)
    dense = {"tp": parallel.tensor, "cp": parallel.context, "pp": parallel.pipeline}
    experts = {"tp": parallel.expert_tensor, "ep": parallel.expert, "pp": parallel.pipeline}
    axes = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    expert_axes = {"tp": "expert_tensor", "ep": "expert", "pp": "pipeline"}
    for sizes, names in ((dense, axes), (experts, expert_axes)):
        data = ranks
        for size in sizes.values():
            data //= size
        generator = RankGenerator(**({"cp": 1, "ep": 1} | sizes), dp=data, order="tp-cp-ep-dp-pp")
        for axis, field in names.items():
            for group in generator.get_ranks(axis):
                assert [getattr(places[rank], field) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(("parallel", "ranks"), LAYOUTS, ids=NAMES)
def test_layers_are_those_of_megatron(parallel: ParallelConfig, ranks: int) -> None:
    device.import_megatron()
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(
        num_layers=LAYERS,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    places = rank_places(parallel, ranks, LAYERS)
    for place in places:
        for chunk, layers in enumerate(place.layers):
            assert layers.start == get_transformer_layer_offset(config, chunk, place.pipeline)
    replicas = ranks // parallel.pipeline
    held = sorted(layer for place in places for layers in place.layers for layer in layers)
    assert held == [layer for layer in range(LAYERS) for _ in range(replicas)]


def architecture(folder: Path, **changes: Any) -> Architecture:
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": LAYERS,
        "vocab_size": 61,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | changes))
    return architecture_of(folder)


class Shapes:
    """A checkpoint without numbers: only the shapes of what is read."""

    def __init__(self, arch: Architecture) -> None:
        self._shapes = hf_shapes(arch)

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], device="meta")
        return tensor if dim is None else tensor.narrow(dim, start, stop - start)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def is_held(row: Parameter, place: RankPlace, parallel: ParallelConfig, arch: Architecture) -> bool:
    if row.expert is not None and row.expert // (arch.num_experts // parallel.expert) != place.expert:
        return False
    if row.layer is not None:
        return any(row.layer in layers for layers in place.layers)
    return place.pipeline == (0 if row.name == EMBEDDING else parallel.pipeline - 1)


def loaded(arch: Architecture, parallel: ParallelConfig, place: RankPlace) -> int:
    """Elements of all shards that the loading of a checkpoint would give this rank."""
    read, total = Shapes(arch), 0
    for row in parameter_table(arch):
        rank, size = place.tensor, parallel.tensor
        if row.expert is not None:
            rank, size = place.expert_tensor, parallel.expert_tensor
        copy = arch.tied_embeddings and row.name == EMBEDDING and place.pipeline == parallel.pipeline - 1 > 0
        if is_held(row, place, parallel, arch) or copy:
            total += load_shard(row.rule, read, row.hf_names, rank, size).numel()
    return total


MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "qk_norm": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 6},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
    "mixed": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 8,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "first_k_dense_replace": 3,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_that_a_rank_loads(tmp_path: Path, model: str) -> None:
    arch = architecture(tmp_path, **MODELS[model])
    for parallel, ranks in LAYOUTS:
        if parallel.expert == 1 or arch.num_experts:
            for place in rank_places(parallel, ranks, arch.num_layers):
                assert parameters_held(arch, parallel, place) == loaded(arch, parallel, place)
