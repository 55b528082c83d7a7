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
        te_whole: whether Transformer Engine's layer holds all of it on every rank, though megatron-core's own split it.
        extra: no part of the model that is trained (multi-token prediction): conversions keep it, the trainer does not.
    """

    template: str
    hf_names: tuple[str, ...]
    rule: Rule
    layer: int | None = None
    expert: int | None = None
    te_template: str = ""
    te_whole: bool = False
    extra: bool = False

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
    te_whole: bool = False
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
        row.te_whole,
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
    """A router, its experts and the norm before them.

    Args:
        arch: the model.
        theirs: Hugging Face's name of the block.
        projections: Hugging Face's names of an expert's gate, up and down projections.
    """
    norm, router = Replicated((arch.hidden_size,)), Replicated((arch.num_experts, arch.hidden_size))
    # Transformer Engine does not fuse the norm in front of a router.
    yield Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), norm)
    yield Row("mlp.router.weight", (theirs + "gate.weight",), router)
    for expert in range(arch.num_experts):
        for row in gated(arch.hidden_size, arch.expert_ffn_size, "", f"{theirs}experts.{expert}.", projections):
            linear = row.name.removesuffix(".weight")
            te_name = f"mlp.experts.{linear}.weight{{expert}}"
            yield Row(_EXPERT + row.name, row.hf_names, row.rule, te_name, expert=expert)
