"""Llama, SmolLM2 and their like: grouped-query attention without biases, SwiGLU, RMSNorm."""

from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a LlamaForCausalLM config.json."""
    require(not config.get("attention_bias"), config, "attention_bias", "Llama attention has no biases here")
    require(not config.get("mlp_bias"), config, "mlp_bias", "the MLP has no biases here")
    return dense_architecture(config, qkv_bias=False)
