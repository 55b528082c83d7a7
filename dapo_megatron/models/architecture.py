"""The dimensions of a decoder-only transformer, read from a Hugging Face config.json."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from dapo_megatron.errors import UserError


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary angles of Llama 3.1 and later: dimensions that turn less than `low_freq_factor` times within
    `original_positions` tokens turn `factor` times slower, those that turn more than `high_freq_factor` times do not.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Rotary angles of YaRN (arXiv 2309.00071): dimensions that turn more than `beta_fast` times within
    `original_positions` tokens keep their speed, those that turn less than `beta_slow` times get `factor` times slower.

    `mscale`, `mscale_all_dim`: how much attention sharpens; the second belongs to the softmax's scale, what the first
    exceeds it by to the rotated part.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: queries (where `query_rank` is a number), keys and values come from small vectors.

    A head's query and key have `nope_dim` numbers without a position and `rope_dim` rotated ones; the rotated part of
    the key is the same for all heads. Its value has `value_dim` numbers.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class SigmoidRouter:
    """DeepSeek's router: experts are chosen by sigmoid + bias and weighted by their sigmoids, scaled to sum to `scale`.

    `groups`: the experts lie in so many groups, and only those of the `groups_per_token` best, by the sums of their two
    best experts, can be chosen.
    """

    groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True)
class Architecture:
    """What Megatron needs to know of a model. Sizes are whole-model, before any sharding.

    Attributes:
        hf_class: its name in `architectures` of config.json.
        head_dim: of a query and key; the values', too, but for `latent` attention.
        ffn_size: of the gated MLP of a layer without experts.
        qkv_bias: whether the projections of queries, keys and values have biases.
        qk_norm: RMSNorm over head_dim of each query and key head.
        num_experts: gated MLPs of `expert_ffn_size` in each layer with experts, of which every token passes through
            `experts_per_token`: those with the largest softmax weights, or what `sigmoid_router` chooses.
        norm_topk_prob: the weights of the chosen experts are scaled to the sum 1.
        dense_layers: so many layers at the start have no experts.
        shared_ffn_size: of an MLP beside the experts that every token passes through; 0: none.
        latent: attention is latent.
        rope_scaling: how rotary angles differ from `rope_theta`'s own.
        activation: of the MLPs' gates; gelu_tanh is the tanh approximation.
        zero_centered_norms: norms multiply by 1 + weight.
        scaled_embeddings: embeddings are multiplied by sqrt(hidden_size).
        mtp_layers: layers for multi-token prediction, which are converted and not trained.
    """

    hf_class: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True
    sigmoid_router: SigmoidRouter | None = None
    dense_layers: int = 0
    shared_ffn_size: int = 0
    latent: LatentAttention | None = None
    rope_scaling: Llama3Scaling | YarnScaling | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    zero_centered_norms: bool = False
    scaled_embeddings: bool = False
    mtp_layers: int = 0

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Vocabulary rows in Megatron: rounded up so that every tensor-parallel rank holds the same number."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of one MLP; layers for multi-token prediction follow the others."""
        return self.num_experts > 0 and layer >= self.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has no experts."""
        return not self.has_experts(0)

    @property
    def uniform_layers(self) -> bool:
        """Whether all layers consist of the same modules. Where not, checkpoints name them one by one."""
        return self.has_experts(0) == (self.num_experts > 0)

    @property
    def value_dim(self) -> int:
        """Numbers in a head's value."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head's query and key that are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim


def require(condition: bool, config: dict[str, Any], key: str, rule: str) -> None:
    """Refuse a Hugging Face config whose `key` asks for something Megatron would silently not do."""
    if not condition:
        raise UserError(f"config.json: {key}={config.get(key)!r} is not supported: {rule}")


def positive(config: dict[str, Any], key: str) -> int:
    """A whole number of at least 1 that a Hugging Face config must state."""
    value: Any = config.get(key)
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value > 0, config, key, "it must be a number of at least 1")
    return int(value)


def number(config: dict[str, Any], key: str, default: float | None = None, *, above: float = 0) -> float:
    """A finite number above a bound that a Hugging Face config, or its rotary parameters, must state.

    Args:
        config: the config, or a part of it.
        key: the number's.
        default: what null or a missing key stands for; where None they are refused.
        above: the bound.
    """
    value: Any = default if config.get(key) is None else config[key]
    real = isinstance(value, int | float) and not isinstance(value, bool)
    require(real and above < value < math.inf, config, key, f"it must be a number above {above}")
    return float(value)


def flag(config: dict[str, Any], key: str, *, default: bool) -> bool:
    """A switch of a Hugging Face config; null is off."""
    value = config.get(key, default)
    require(value is None or isinstance(value, bool), config, key, "it must be true or false")
    return bool(value)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of rotary positions, always with `rope_type`; without what is null.

    It stands under `rope_parameters` (transformers 5) or `rope_scaling` (4).

    Raises:
        UserError: if both are there and differ, layers differ, or only a part of each head is rotated.
    """
    for key in ("rope_scaling", "rope_parameters"):
        values = config.get(key) or {}
        rule = "it must be an object of values that hold for all layers"
        plain = isinstance(values, dict) and not any(isinstance(value, dict) for value in values.values())
        require(plain, config, key, rule)
    parameters, older = (_rope_values(config, key) for key in ("rope_parameters", "rope_scaling"))
    if config.get("rope_scaling") and config.get("rope_parameters"):
        # transformers itself takes the older key, and not all of its versions do
        require(parameters == older, config, "rope_scaling", f"rope_parameters={config['rope_parameters']!r} differs")
    found = parameters if config.get("rope_parameters") else older
    for values in (config, found):
        rule = "whole heads are rotated"
        require(values.get("partial_rotary_factor") in (None, 1), values, "partial_rotary_factor", rule)
    return found


def _rope_values(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Rotary parameters under one key, with the base from beside it where that is not among them."""
    values = {name: value for name, value in (config.get(key) or {}).items() if value is not None}
    kind = values.pop("type", None)
    base = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    return {"rope_type": kind or "default"} | base | values


def llama3_scaling(config: dict[str, Any]) -> Llama3Scaling | None:
    """Llama 3's scaling of rotary positions, if there is one.

    Raises:
        UserError: for any other scaling, or one whose numbers make no sense.
    """
    parameters = rope_parameters(config)
    kinds = ("default", "llama3")
    require(parameters["rope_type"] in kinds, parameters, "rope_type", f"use {' or '.join(kinds)}")
    if parameters["rope_type"] == "default":
        return None
    low = number(parameters, "low_freq_factor")
    return Llama3Scaling(
        factor=number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=number(parameters, "high_freq_factor", above=low),
        original_positions=positive(parameters, "original_max_position_embeddings"),
    )


def require_plain(config: dict[str, Any]) -> None:
    """Refuse what no family does here, whether or not its own code in transformers would read the key."""
    causal = "attention is causal over all tokens"
    require(not config.get("use_sliding_window"), config, "use_sliding_window", causal)
    kinds = config.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    require(full, config, "layer_types", causal)
    require(not config.get("use_bidirectional_attention"), config, "use_bidirectional_attention", causal)
    for key in ("attention_bias", "mlp_bias"):
        require(not config.get(key), config, key, "the model must have no such biases")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        require(not config.get(key), config, key, "scores and logits are not capped")
    require(config.get("pretraining_tp") in (None, 1), config, "pretraining_tp", "projections are not cut into slices")
    rule = "the weights must be stored unquantised: dequantise the checkpoint first"
    require(not config.get("quantization_config"), config, "quantization_config", rule)


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def dense_architecture(
    config: dict[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    hidden_act: str = "silu",
    default_theta: float = 10000.0,
    default_tied: bool = False,
) -> Architecture:
    """The fields that all Llama-like families spell the same way. The other arguments are the family's own.

    Raises:
        UserError: if a field is missing, is no number of its range, or asks for something unsupported.
    """
    require_plain(config)
    require(config.get("hidden_act", hidden_act) == hidden_act, config, "hidden_act", f"it must be {hidden_act}")
    for key in ("architectures", *_SIZES, "rms_norm_eps"):
        if key not in config:
            raise UserError(f"config.json: the key {key!r} is missing")
    layers, hidden, heads, ffn, vocab, positions = (positive(config, key) for key in _SIZES)
    kv_heads = heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads")
    require(heads % kv_heads == 0, config, "num_key_value_heads", f"it must divide the {heads} heads")
    own_dim = config.get("head_dim") is not None
    require(own_dim or hidden % heads == 0, config, "head_dim", f"{heads} heads do not divide hidden_size={hidden}")
    return Architecture(
        hf_class=str(config["architectures"][0]),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=positive(config, "head_dim") if own_dim else hidden // heads,
        ffn_size=ffn,
        vocab_size=vocab,
        norm_eps=number(config, "rms_norm_eps"),
        rope_theta=number(rope_parameters(config), "rope_theta", default_theta, above=1),
        max_positions=positions,
        tied_embeddings=flag(config, "tie_word_embeddings", default=default_tied),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rope_scaling=llama3_scaling(config),
    )


def softmax_experts(config: dict[str, Any], count_key: str, ffn_key: str, *, norm_topk_prob: bool) -> dict[str, Any]:
    """Fields of an `Architecture` with experts in every layer and a softmax router.

    Args:
        config: a config.json.
        count_key: says how many experts there are.
        ffn_key: says of which size they are.
        norm_topk_prob: see `Architecture`.

    Raises:
        UserError: if the numbers are missing or do not fit.
    """
    num_experts, chosen = positive(config, count_key), positive(config, "num_experts_per_tok")
    require(chosen <= num_experts, config, "num_experts_per_tok", f"there are {num_experts} experts")
    # one expert's normalised weight is always 1: Megatron refuses it, since the router would get no gradient
    rule = "a single expert's weight, scaled to the sum 1, would never change"
    require(chosen > 1 or not norm_topk_prob, config, "num_experts_per_tok", rule)
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "expert_ffn_size": positive(config, ffn_key),
        "norm_topk_prob": norm_topk_prob,
    }
