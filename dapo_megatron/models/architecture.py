"""The dimensions of a decoder-only transformer, read from a Hugging Face config.json."""

from dataclasses import dataclass
from typing import Any

from dapo_megatron.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """What Megatron needs to know of a model. Sizes are whole-model, before any sharding.

    With experts (`num_experts` > 0) every layer has a router and `num_experts` MLPs of `expert_ffn_size`, of which each
    token passes through the `experts_per_token` with the largest softmax weights. `norm_topk_prob`: those weights are
    scaled to the sum 1. `ffn_size` is then of no use. `qk_norm`: RMSNorm over head_dim of each query and key head.
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

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Vocabulary rows in Megatron: rounded up so that every tensor-parallel rank holds the same number."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def require(condition: bool, config: dict[str, Any], key: str, rule: str) -> None:
    """Refuse a Hugging Face config whose `key` asks for something Megatron would silently not do."""
    if not condition:
        raise UserError(f"config.json: {key}={config.get(key)!r} is not supported: {rule}")


def positive(config: dict[str, Any], key: str) -> int:
    """A whole number of at least 1 that a Hugging Face config must state."""
    value = config.get(key)
    require(isinstance(value, int) and value > 0, config, key, "it must be a number of at least 1")
    return int(config[key])


def rope_theta(config: dict[str, Any]) -> float:
    """The rotary base, from `rope_parameters` (transformers 5) or `rope_theta` (4).

    Raises:
        UserError: if the positions are scaled (another rope type than the default).
    """
    parameters: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    require(kind == "default", {"rope_type": kind}, "rope_type", "only unscaled rotary embeddings are")
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)


def require_full_attention(config: dict[str, Any]) -> None:
    """Refuse layers that see only a window of the tokens before them."""
    rule = "attention is causal over all tokens"
    require(not config.get("use_sliding_window"), config, "use_sliding_window", rule)
    kinds = config.get("layer_types") or ["full_attention"]
    require(set(kinds) == {"full_attention"}, config, "layer_types", rule)


def dense_architecture(config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool = False) -> Architecture:
    """The fields that all Llama-like families spell the same way.

    Raises:
        UserError: if a field is missing or asks for something unsupported.
    """
    require(config.get("hidden_act", "silu") == "silu", config, "hidden_act", "the MLP must be SwiGLU")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return Architecture(
            hf_class=str(config["architectures"][0]),
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=rope_theta(config),
            max_positions=int(config["max_position_embeddings"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
        )
    except KeyError as error:
        raise UserError(f"config.json: the key {error.args[0]!r} is missing") from None
