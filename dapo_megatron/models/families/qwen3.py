"""Qwen3: Llama with an RMSNorm on each query and key head, and heads whose size is chosen freely."""

from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require
from dapo_megatron.models.families import Family, llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a Qwen3ForCausalLM config.json."""
    # transformers' own defaults (128 and 32) follow from no other dimension: a guess would be another model
    for key in ("head_dim", "num_key_value_heads"):
        require(config.get(key) is not None, config, key, "Qwen3 must state it")
    return dense_architecture(config, qk_norm=True)


FAMILY = Family(("Qwen3ForCausalLM",), architecture, llama.parameters)
