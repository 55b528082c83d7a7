"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture
from dapo_megatron.models.families import Family, llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a Qwen2ForCausalLM config.json."""
    return dense_architecture(config, qkv_bias=True)


FAMILY = Family(("Qwen2ForCausalLM",), architecture, llama.parameters)
