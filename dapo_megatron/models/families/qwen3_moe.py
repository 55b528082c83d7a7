"""Qwen3-MoE: Qwen3 attention; in every layer a softmax router over many small SwiGLU MLPs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dapo_megatron.models.architecture import Architecture, positive, require
from dapo_megatron.models.families import Family, qwen3
from dapo_megatron.models.parameters import Parameter, Row, attention, decoder, experts


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a Qwen3MoeForCausalLM config.json."""
    require(config.get("decoder_sparse_step", 1) == 1, config, "decoder_sparse_step", "every layer must have experts")
    require(not config.get("mlp_only_layers"), config, "mlp_only_layers", "every layer must have experts")
    num_experts = positive(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    chosen = positive(config, "num_experts_per_tok")
    norm_topk_prob = bool(config.get("norm_topk_prob", False))
    require(chosen <= num_experts, config, "num_experts_per_tok", f"there are {num_experts} experts")
    # one expert's normalised weight is always 1: Megatron refuses it, since the router would get no gradient
    require(chosen > 1 or not norm_topk_prob, config, "norm_topk_prob", "a single expert's weight must stay as it is")
    return replace(
        qwen3.architecture(config),
        num_experts=num_experts,
        experts_per_token=chosen,
        expert_ffn_size=positive(config, "moe_intermediate_size"),
        norm_topk_prob=norm_topk_prob,
    )


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """The parameter table."""
    return decoder(arch, _layer)


def _layer(arch: Architecture, layer: int) -> Iterator[Row]:
    yield from attention(arch)
    yield from experts(arch)


FAMILY = Family(("Qwen3MoeForCausalLM",), architecture, parameters)
