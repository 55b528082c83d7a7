"""Mixtral: Llama's attention; in every layer a softmax router over few large gated MLPs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dapo_megatron.models.architecture import Architecture, dense_architecture, require, softmax_experts
from dapo_megatron.models.families import Family
from dapo_megatron.models.parameters import Parameter, Row, attention, decoder, experts


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a MixtralForCausalLM config.json."""
    require(config.get("sliding_window") is None, config, "sliding_window", "attention is causal over all tokens")
    require(not config.get("router_jitter_noise"), config, "router_jitter_noise", "routers get no noise")
    require(bool(config.get("num_key_value_heads")), config, "num_key_value_heads", "Mixtral must state it")
    fields = softmax_experts(config, "num_local_experts", "intermediate_size", norm_topk_prob=True)
    return replace(dense_architecture(config, default_theta=1e6), **fields)


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """The parameter table."""
    return decoder(arch, _layer)


def _layer(arch: Architecture, layer: int) -> Iterator[Row]:
    yield from attention(arch)
    yield from experts(arch, "block_sparse_moe.", ("w1", "w3", "w2"))


FAMILY = Family(("MixtralForCausalLM",), architecture, parameters)
