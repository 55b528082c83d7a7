"""Gemma 1: Llama with GELU, norms that multiply by 1 + weight, and embeddings times sqrt(hidden_size).

Gemma 2 and 3 cap their logits, norm each sublayer's output as well and look through sliding windows: other families.
"""

from dataclasses import replace
from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require
from dapo_megatron.models.families import Family, llama


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a GemmaForCausalLM config.json."""
    for key in ("head_dim", "num_key_value_heads"):
        require(config.get(key) is not None, config, key, "Gemma must state it")
    # "gelu" in the first releases means the tanh approximation, as transformers and vLLM read it
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu"
    require(activation in ("gelu", ACTIVATION), config, "hidden_act", f"it must be {ACTIVATION}")
    dense = dense_architecture(config | {"hidden_act": ACTIVATION}, hidden_act=ACTIVATION, default_tied=True)
    return replace(dense, activation="gelu_tanh", zero_centered_norms=True, scaled_embeddings=True)


ACTIVATION = "gelu_pytorch_tanh"
FAMILY = Family(("GemmaForCausalLM",), architecture, llama.parameters)
