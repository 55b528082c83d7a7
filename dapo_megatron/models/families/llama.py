"""Llama, SmolLM2 and their like: grouped-query attention without biases, gated MLPs, RMSNorm."""

from collections.abc import Iterator
from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture
from dapo_megatron.models.families import Family
from dapo_megatron.models.parameters import Parameter, Row, attention, decoder, experts, mlp


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a LlamaForCausalLM config.json."""
    return dense_architecture(config)


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """The parameter table, also of the families whose tensors have the same names."""
    return decoder(arch, _layer)


def _layer(arch: Architecture, layer: int) -> Iterator[Row]:
    yield from attention(arch)
    yield from experts(arch) if arch.has_experts(layer) else mlp(arch)


FAMILY = Family(("LlamaForCausalLM",), architecture, parameters)
