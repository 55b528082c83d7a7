"""Mistral: Llama, but for a sliding window of attention, which some releases have and which is refused."""

from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require
from dapo_megatron.models.families import Family, llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a MistralForCausalLM config.json."""
    require_no_window(config)
    # transformers' own default (8) follows from no other dimension: a guess would be another model
    require(bool(config.get("num_key_value_heads")), config, "num_key_value_heads", "Mistral must state it")
    return dense_architecture(config)


def require_no_window(config: dict[str, Any]) -> None:
    """Refuse a sliding window; transformers takes a missing `sliding_window` for one of 4,096 tokens."""
    stated = "sliding_window" in config
    require(stated and config["sliding_window"] is None, config, "sliding_window", "it must be stated as null")


FAMILY = Family(("MistralForCausalLM",), architecture, llama.parameters)
