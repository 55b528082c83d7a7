"""Qwen3-MoE: Qwen3 attention; in every layer a softmax router over many small gated MLPs."""

from dataclasses import replace
from typing import Any

from dapo_megatron.models.architecture import Architecture, flag, require, softmax_experts
from dapo_megatron.models.families import Family, llama, qwen3


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a Qwen3MoeForCausalLM config.json."""
    require(config.get("decoder_sparse_step", 1) == 1, config, "decoder_sparse_step", "every layer must have experts")
    require(not config.get("mlp_only_layers"), config, "mlp_only_layers", "every layer must have experts")
    count_key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    normalised = flag(config, "norm_topk_prob", default=False)
    fields = softmax_experts(config, count_key, "moe_intermediate_size", norm_topk_prob=normalised)
    return replace(qwen3.architecture(config), **fields)


FAMILY = Family(("Qwen3MoeForCausalLM",), architecture, llama.parameters)
