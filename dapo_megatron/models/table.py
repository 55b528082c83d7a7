"""The parameter table: which Megatron parameter is made of which Hugging Face tensors.

Loading, export and weight push all read it, so that names and layouts are stated once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.sharding import FusedQKV, GateUp, Replicated, ShardRule, Split

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Parameter:
    """One row: Megatron name (with the global layer number), Hugging Face names, rule, and layer (None: no layer)."""

    name: str
    hf_names: tuple[str, ...]
    rule: ShardRule
    layer: int | None = None


def dense_table(arch: Architecture) -> Iterator[Parameter]:
    """The rows of a Llama-like model, in the order of a forward pass."""
    vocab = Split(0, arch.vocab_size)
    yield Parameter(EMBEDDING, ("model.embed_tokens.weight",), vocab)
    for layer in range(arch.num_layers):
        yield from _dense_layer(arch, layer)
    yield Parameter(FINAL_NORM, ("model.norm.weight",), Replicated())
    if not arch.tied_embeddings:
        yield Parameter(OUTPUT, ("lm_head.weight",), vocab)


def _dense_layer(arch: Architecture, layer: int) -> Iterator[Parameter]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    qkv = FusedQKV(arch.num_heads, arch.num_kv_heads, arch.head_dim)
    heads = Split(1, arch.num_heads * arch.head_dim)
    rows: list[tuple[str, tuple[str, ...], ShardRule]] = [
        ("input_layernorm.weight", ("input_layernorm.weight",), Replicated()),
        ("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), qkv),
        ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), heads),
        ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated()),
        ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp(arch.ffn_size)),
        ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Split(1, arch.ffn_size)),
    ]
    if arch.qkv_bias:
        rows.insert(2, ("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), qkv))
    for name, hf_names, rule in rows:
        yield Parameter(ours + name, tuple(theirs + hf for hf in hf_names), rule, layer)


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor of `arch`, in the order `export_weights` yields them."""
    hidden, q, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    by_suffix: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (arch.vocab_size, hidden),
        "lm_head.weight": (arch.vocab_size, hidden),
        "q_proj.weight": (q, hidden),
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "o_proj.weight": (hidden, q),
        "gate_proj.weight": (arch.ffn_size, hidden),
        "up_proj.weight": (arch.ffn_size, hidden),
        "down_proj.weight": (hidden, arch.ffn_size),
        "norm.weight": (hidden,),
        "layernorm.weight": (hidden,),
    }
    names = [name for row in dense_table(arch) for name in row.hf_names]
    return {name: next(shape for suffix, shape in by_suffix.items() if name.endswith(suffix)) for name in names}
