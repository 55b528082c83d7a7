"""DeepSeek-V3 and R1: latent attention; dense layers, then experts behind a sigmoid router with a shared expert."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dapo_megatron.models.architecture import (
    Architecture,
    LatentAttention,
    SigmoidRouter,
    YarnScaling,
    dense_architecture,
    number,
    positive,
    require,
    rope_parameters,
)
from dapo_megatron.models.families import Family
from dapo_megatron.models.parameters import (
    Parameter,
    Row,
    decoder,
    experts,
    latent_attention,
    mlp,
    multi_token_prediction,
)


def architecture(config: dict[str, Any]) -> Architecture:
    """Dimensions from a DeepseekV3ForCausalLM config.json."""
    # transformers norms queries, keys and values with its own 1e-6, Megatron with the one of all other norms
    require(config.get("rms_norm_eps") == 1e-6, config, "rms_norm_eps", "it must be 1e-06")
    heads, latent = positive(config, "num_attention_heads"), _latent(config)
    rule = "latent attention has a key and a value for each head"
    require(config.get("num_key_value_heads", heads) == heads, config, "num_key_value_heads", rule)
    require(config.get("rope_interleave", True) is True, config, "rope_interleave", "rotated pairs lie side by side")
    rotary = {"rope_parameters": {"rope_theta": rope_parameters(config).get("rope_theta")}, "rope_scaling": None}
    own = {"num_key_value_heads": heads, "head_dim": latent.nope_dim + latent.rope_dim}
    return replace(
        dense_architecture(config | rotary | own),
        latent=latent,
        rope_scaling=_yarn(config),
        mtp_layers=positive(config, "num_nextn_predict_layers") if config.get("num_nextn_predict_layers") else 0,
        **_experts(config),
    )


def _latent(config: dict[str, Any]) -> LatentAttention:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    query_rank = None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank")
    return LatentAttention(query_rank, *(positive(config, key) for key in keys))


def _yarn(config: dict[str, Any]) -> YarnScaling | None:
    values = rope_parameters(config)
    require(values["rope_type"] in ("default", "yarn"), values, "rope_type", "use default or yarn")
    if values["rope_type"] == "default":
        return None
    require(values.get("attention_factor") is None, values, "attention_factor", "it follows from mscale")
    require(values.get("truncate", True) is True, values, "truncate", "the range of dimensions is rounded")
    stated = bool(values.get("mscale"))
    both = stated == bool(values.get("mscale_all_dim"))
    require(both, values, "mscale", "state both mscale and mscale_all_dim or neither")
    slow = number(values, "beta_slow", 1)
    return YarnScaling(
        factor=number(values, "factor"),
        original_positions=positive(values, "original_max_position_embeddings"),
        beta_fast=number(values, "beta_fast", 32, above=slow),
        beta_slow=slow,
        mscale=number(values, "mscale") if stated else 1.0,
        mscale_all_dim=number(values, "mscale_all_dim") if stated else 0.0,
    )


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of the architecture that belong to layers with experts."""
    require(config.get("scoring_func", "sigmoid") == "sigmoid", config, "scoring_func", "it must be sigmoid")
    require(config.get("topk_method", "noaux_tc") == "noaux_tc", config, "topk_method", "it must be noaux_tc")
    require(config.get("moe_layer_freq", 1) == 1, config, "moe_layer_freq", "every later layer must have experts")
    num_experts, chosen = positive(config, "n_routed_experts"), positive(config, "num_experts_per_tok")
    dense_layers, layers = config.get("first_k_dense_replace"), positive(config, "num_hidden_layers")
    within = isinstance(dense_layers, int) and 0 <= dense_layers < layers
    require(within, config, "first_k_dense_replace", f"of {layers} layers one at least must have experts")
    require(1 < chosen <= num_experts, config, "num_experts_per_tok", f"it must be 2 to {num_experts}, the experts")
    require(config.get("norm_topk_prob") is True, config, "norm_topk_prob", "it must be true")
    expert_size = positive(config, "moe_intermediate_size")
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "expert_ffn_size": expert_size,
        "sigmoid_router": _router(config, num_experts, chosen),
        "dense_layers": dense_layers,
        "shared_ffn_size": expert_size * positive(config, "n_shared_experts"),
    }


def _router(config: dict[str, Any], num_experts: int, chosen: int) -> SigmoidRouter:
    groups, per_token = positive(config, "n_group"), positive(config, "topk_group")
    require(num_experts % groups == 0, config, "n_group", f"it must divide the {num_experts} experts")
    require(per_token <= groups, config, "topk_group", f"there are {groups} groups")
    if per_token == groups:  # no group is ever left out
        groups = per_token = 1
    else:  # Megatron adds up as many of a group's experts as each chosen group gives on average
        rule = f"it must be half of num_experts_per_tok={chosen}: groups are compared by their two best experts"
        require(chosen == 2 * per_token, config, "topk_group", rule)
        require(num_experts // groups >= 2, config, "n_group", "a group must have two experts at least")
    # transformers' own default (2.5) follows from no other number: a guess would be another model
    return SigmoidRouter(groups, per_token, number(config, "routed_scaling_factor"))


def parameters(arch: Architecture) -> Iterator[Parameter]:
    """The parameter table; the layers of multi-token prediction come last."""
    yield from decoder(arch, _layer)
    yield from multi_token_prediction(arch, _layer)


def _layer(arch: Architecture, layer: int) -> Iterator[Row]:
    yield from latent_attention(arch)
    yield from experts(arch) if arch.has_experts(layer) else mlp(arch)


FAMILY = Family(("DeepseekV3ForCausalLM",), architecture, parameters)
