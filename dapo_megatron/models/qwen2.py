"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a Qwen2ForCausalLM config.json."""
    require(not config.get("use_sliding_window"), config, "use_sliding_window", "attention is causal over all tokens")
    return dense_architecture(config, qkv_bias=True)
