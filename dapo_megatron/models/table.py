"""The parameter table: which Megatron parameter is made of which Hugging Face tensors.

Loading, export and weight push all read it, so that names and layouts are stated once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.sharding import FusedQKV, GateUp, Replicated, ShardRule, Split

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


Row = tuple[str, tuple[str, ...], ShardRule]


@dataclass(frozen=True)
class Parameter:
    """One row: Megatron name (with global layer and expert numbers), Hugging Face names, rule, layer and expert.

    `layer` is None for what belongs to no layer, `expert` (global number) for what belongs to no single expert. The
    rule of an expert's row counts ranks of the expert-tensor-parallel group, that of all others tensor-parallel ranks.
    """

    name: str
    hf_names: tuple[str, ...]
    rule: ShardRule
    layer: int | None = None
    expert: int | None = None


def parameter_table(arch: Architecture) -> Iterator[Parameter]:
    """The rows of a model, in the order of a forward pass."""
    vocab = Split(0, arch.vocab_size)
    yield Parameter(EMBEDDING, ("model.embed_tokens.weight",), vocab)
    for layer in range(arch.num_layers):
        yield from _layer(arch, layer)
    yield Parameter(FINAL_NORM, ("model.norm.weight",), Replicated())
    if not arch.tied_embeddings:
        yield Parameter(OUTPUT, ("lm_head.weight",), vocab)


def _layer(arch: Architecture, layer: int) -> Iterator[Parameter]:
    def rows(ours: str, theirs: str, rows: Iterable[Row], expert: int | None = None) -> Iterator[Parameter]:
        for name, hf_names, rule in rows:
            full_names = tuple(f"model.layers.{layer}.{theirs}{hf}" for hf in hf_names)
            yield Parameter(f"decoder.layers.{layer}.{ours}{name}", full_names, rule, layer, expert)

    yield from rows("", "", _attention(arch))
    if not arch.num_experts:
        yield from rows("mlp.", "mlp.", _mlp(arch.ffn_size))
        return
    yield from rows("mlp.", "mlp.", [("router.weight", ("gate.weight",), Replicated())])
    for expert in range(arch.num_experts):
        yield from rows(
            f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}.", _mlp(arch.expert_ffn_size), expert
        )


def _attention(arch: Architecture) -> Iterator[Row]:
    """Everything of a layer but its MLP."""
    qkv = FusedQKV(arch.num_heads, arch.num_kv_heads, arch.head_dim)
    yield "input_layernorm.weight", ("input_layernorm.weight",), Replicated()
    yield "self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), qkv
    if arch.qkv_bias:
        yield "self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), qkv
    if arch.qk_norm:
        yield "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()
        yield "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()
    heads = Split(1, arch.num_heads * arch.head_dim)
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), heads
    yield "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated()


def _mlp(ffn_size: int) -> Iterator[Row]:
    yield "linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), GateUp(ffn_size)
    yield "linear_fc2.weight", ("down_proj.weight",), Split(1, ffn_size)


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor of `arch`, in the order `export_weights` yields them."""
    hidden, q, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    ffn = arch.expert_ffn_size if arch.num_experts else arch.ffn_size
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
        "mlp.gate.weight": (arch.num_experts, hidden),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
        "q_norm.weight": (arch.head_dim,),
        "k_norm.weight": (arch.head_dim,),
        "norm.weight": (hidden,),
        "layernorm.weight": (hidden,),
    }
    names = [name for row in parameter_table(arch) for name in row.hf_names]
    return {name: next(shape for suffix, shape in by_suffix.items() if name.endswith(suffix)) for name in names}
