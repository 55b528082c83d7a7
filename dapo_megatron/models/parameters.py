"""Rows of the parameter table, and the blocks from which the model families make theirs. No torch."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_megatron.models.rules import FusedQKV, GateUp, Replicated, Rule, Split

if TYPE_CHECKING:
    from dapo_megatron.models.architecture import Architecture

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
EXPERT_BIAS = "mlp.router.expert_bias"

_LAYER, _EXPERT = "decoder.layers.{layer}.", "mlp.experts.local_experts.{expert}."


@dataclass(frozen=True)
class Parameter:
    """One row: a Megatron parameter (or buffer) and the Hugging Face tensors it is made of.

    Attributes:
        template: its name in megatron-core's own layers, with `{layer}` and `{expert}` for their numbers.
        hf_names: the tensors' names.
        rule: how they are fused and shared: among expert-tensor-parallel ranks where `expert` is set, else among
            tensor-parallel ranks.
        layer: number in the whole model; None for what belongs to no layer of the decoder.
        expert: number in the whole model; None for what belongs to no single expert.
        te_template: the name in Transformer Engine's layers, where it is another.
        extra: no part of the model that is trained (multi-token prediction): conversions keep it, the trainer does not.
    """

    template: str
    hf_names: tuple[str, ...]
    rule: Rule
    layer: int | None = None
    expert: int | None = None
    te_template: str = ""
    extra: bool = False

    @property
    def is_buffer(self) -> bool:
        """Whether Megatron keeps it as an fp32 buffer, which no optimizer updates."""
        return self.template.endswith(EXPERT_BIAS)

    @property
    def name(self) -> str:
        """The name with the numbers of the whole model."""
        return self.template.format(layer=self.layer, expert=self.expert)

    def local_name(self, layer: int | None, expert: int | None, *, te: bool) -> str:
        """The name in a model chunk that counts its layers and experts from its own first."""
        template = self.te_template if te and self.te_template else self.template
        return template.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Row:
    """A parameter relative to its layer (or MLP): names in Megatron, in Hugging Face and in Transformer Engine."""

    name: str
    hf_names: tuple[str, ...]
    rule: Rule
    te_name: str = ""
    expert: int | None = None


LayerRows = Callable[["Architecture", int], Iterable[Row]]


def decoder(arch: "Architecture", layer_rows: LayerRows) -> Iterator[Parameter]:
    """The table of a decoder whose layers hold `layer_rows(arch, layer)`, in the order of a forward pass."""
    vocab = Split(0, (arch.vocab_size, arch.hidden_size))
    yield Parameter(EMBEDDING, ("model.embed_tokens.weight",), vocab)
    for layer in range(arch.num_layers):
        for row in layer_rows(arch, layer):
            yield in_layer(row, _LAYER, f"model.layers.{layer}.", layer)
    yield Parameter(FINAL_NORM, ("model.norm.weight",), Replicated((arch.hidden_size,)))
    if not arch.tied_embeddings:
        yield Parameter(OUTPUT, ("lm_head.weight",), vocab)


def in_layer(row: Row, ours: str, theirs: str, layer: int | None, *, extra: bool = False) -> Parameter:
    """A layer's row with whole names: `ours` and `theirs` are what stands before them."""
    return Parameter(
        ours + row.name,
        tuple(theirs + name for name in row.hf_names),
        row.rule,
        layer,
        row.expert,
        ours + row.te_name if row.te_name else "",
        extra,
    )


def attention(arch: "Architecture") -> Iterator[Row]:
    """Grouped-query attention and the norm before it."""
    hidden, width = arch.hidden_size, arch.num_heads * arch.head_dim
    sizes = (arch.num_heads, arch.num_kv_heads, arch.head_dim)
    norm, ours = Replicated((hidden,)), "self_attention."
    yield Row("input_layernorm.weight", ("input_layernorm.weight",), norm, ours + "linear_qkv.layer_norm_weight")
    yield Row(ours + "linear_qkv.weight", _self_attn("{}_proj.weight", "qkv"), FusedQKV(*sizes, hidden))
    if arch.qkv_bias:
        yield Row(ours + "linear_qkv.bias", _self_attn("{}_proj.bias", "qkv"), FusedQKV(*sizes, None))
    if arch.qk_norm:
        for x in "qk":
            yield Row(f"{ours}{x}_layernorm.weight", _self_attn("{}_norm.weight", x), Replicated((arch.head_dim,)))
    yield Row(ours + "linear_proj.weight", _self_attn("{}_proj.weight", "o"), Split(1, (hidden, width)))


def latent_attention(arch: "Architecture") -> Iterator[Row]:
    """Multi-head latent attention and the norm before it. Every rank has the projections to the small vectors whole."""
    assert arch.latent is not None
    latent, hidden, heads = arch.latent, arch.hidden_size, arch.num_heads
    query_width = heads * arch.head_dim
    # Transformer Engine does not fuse the norm in front of these projections.
    yield Row("input_layernorm.weight", ("input_layernorm.weight",), Replicated((hidden,)))
    if latent.query_rank is None:
        yield _latent("linear_q_proj", "q_proj", Split(0, (query_width, hidden)))
    else:
        yield _latent("linear_q_down_proj", "q_a_proj", Replicated((latent.query_rank, hidden)))
        yield _latent("q_layernorm", "q_a_layernorm", Replicated((latent.query_rank,)), "linear_q_up_proj")
        yield _latent("linear_q_up_proj", "q_b_proj", Split(0, (query_width, latent.query_rank)))
    down, up = latent.kv_rank + latent.rope_dim, heads * (latent.nope_dim + latent.value_dim)
    yield _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", Replicated((down, hidden)))
    yield _latent("kv_layernorm", "kv_a_layernorm", Replicated((latent.kv_rank,)), "linear_kv_up_proj")
    yield _latent("linear_kv_up_proj", "kv_b_proj", Split(0, (up, latent.kv_rank)))
    yield _latent("linear_proj", "o_proj", Split(1, (hidden, heads * latent.value_dim)))


def _latent(ours: str, theirs: str, rule: Rule, te_linear: str = "") -> Row:
    """A weight of latent attention; a norm is fused into Transformer Engine's `te_linear`."""
    te_name = f"self_attention.{te_linear}.layer_norm_weight" if te_linear else ""
    return Row(f"self_attention.{ours}.weight", (f"self_attn.{theirs}.weight",), rule, te_name)


def _self_attn(name: str, letters: str) -> tuple[str, ...]:
    return tuple("self_attn." + name.format(letter) for letter in letters)


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def mlp(arch: "Architecture") -> Iterator[Row]:
    """A gated MLP and the norm before it."""
    norm = Replicated((arch.hidden_size,))
    te_name = "mlp.linear_fc1.layer_norm_weight"
    yield Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), norm, te_name)
    yield from gated(arch.hidden_size, arch.ffn_size, "mlp.", "mlp.")


def gated(hidden: int, ffn: int, ours: str, theirs: str, projections: tuple[str, str, str] = PROJECTIONS) -> list[Row]:
    """The weights of a gated MLP of size `ffn`; `projections` are their names: gate, up and down."""
    gate, up, down = (f"{theirs}{name}.weight" for name in projections)
    return [
        Row(ours + "linear_fc1.weight", (gate, up), GateUp(ffn, hidden)),
        Row(ours + "linear_fc2.weight", (down,), Split(1, (hidden, ffn))),
    ]


def experts(
    arch: "Architecture", theirs: str = "mlp.", projections: tuple[str, str, str] = PROJECTIONS
) -> Iterator[Row]:
    """A router, its experts, the shared expert if there is one, and the norm before them.

    Args:
        arch: the model.
        theirs: Hugging Face's name of the block.
        projections: Hugging Face's names of an expert's gate, up and down projections.
    """
    norm, router = Replicated((arch.hidden_size,)), Replicated((arch.num_experts, arch.hidden_size))
    # Transformer Engine does not fuse the norm in front of a router.
    yield Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), norm)
    yield Row("mlp.router.weight", (theirs + "gate.weight",), router)
    if arch.sigmoid_router:
        yield Row(EXPERT_BIAS, (theirs + "gate.e_score_correction_bias",), Replicated((arch.num_experts,)))
    for expert in range(arch.num_experts):
        for row in gated(arch.hidden_size, arch.expert_ffn_size, "", f"{theirs}experts.{expert}.", projections):
            linear = row.name.removesuffix(".weight")
            te_name = f"mlp.experts.{linear}.weight{{expert}}"
            yield Row(_EXPERT + row.name, row.hf_names, row.rule, te_name, expert=expert)
    if arch.shared_ffn_size:
        yield from gated(arch.hidden_size, arch.shared_ffn_size, "mlp.shared_experts.", theirs + "shared_experts.")


def multi_token_prediction(arch: "Architecture", layer_rows: LayerRows) -> Iterator[Parameter]:
    """The layers behind the last one that predict tokens further ahead, each with copies of embedding and output."""
    vocab, hidden = Split(0, (arch.vocab_size, arch.hidden_size)), arch.hidden_size
    for i in range(arch.mtp_layers):
        layer = arch.num_layers + i
        ours, theirs = f"mtp.layers.{i}.", f"model.layers.{layer}."
        yield in_layer(Row(EMBEDDING, ("embed_tokens.weight",), vocab), ours, theirs, None, extra=True)
        for norm in ("enorm.weight", "hnorm.weight"):
            yield in_layer(Row(norm, (norm,), Replicated((hidden,))), ours, theirs, None, extra=True)
        joined = Row("eh_proj.weight", ("eh_proj.weight",), Split(0, (hidden, 2 * hidden)))
        yield in_layer(joined, ours, theirs, None, extra=True)
        for row in layer_rows(arch, layer):
            yield in_layer(row, ours + "transformer_layer.", theirs, None, extra=True)
        final = Row("final_layernorm.weight", ("shared_head.norm.weight",), Replicated((hidden,)))
        yield in_layer(final, ours, theirs, None, extra=True)
        yield in_layer(Row(OUTPUT, ("shared_head.head.weight",), vocab), ours, theirs, None, extra=True)
