"""Llama, SmolLM2 and their like: grouped-query attention without biases, SwiGLU, RMSNorm."""

from collections.abc import Iterator
from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require
from dapo_megatron.models.families import Family
from dapo_megatron.models.parameters import Parameter, Row, attention, decoder, mlp


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a LlamaForCausalLM config.json."""
    require(not config.get("attention_bias"), config, "attention_bias", "Llama attention has no biases here")
    require(not config.get("mlp_bias"), config, "mlp_bias", "the MLP has no biases here")
    return dense_architecture(config, qkv_bias=False)


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """The parameter table, also of the families that differ in attention's biases and norms alone."""
    return decoder(arch, _layer)


def _layer(arch: Architecture, layer: int) -> Iterator[Row]:
    yield from attention(arch)
    yield from mlp(arch)


FAMILY = Family(("LlamaForCausalLM",), architecture, parameters)
