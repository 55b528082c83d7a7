"""Hugging Face tensors as Megatron shards and back; the parameter table against transformers' models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import EMBEDDING, OUTPUT, Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.rules import FusedQKV, GateUp, Replicated, Rule, Split
from dapo_megatron.models.sharding import load_shard, merge_shards
from dapo_megatron.models.table import hf_shapes, parameter_table
from tests.models import TINY_FAMILIES

Stretch = tuple[str, int | None, int, int]


@dataclass
class RecordingReader:
    """Reads from a dict and remembers what was asked for."""

    tensors: dict[str, Tensor]
    asked: list[Stretch] = field(default_factory=list)

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        self.asked.append((name, dim, start, stop))
        whole = self.tensors[name]
        return whole if dim is None else whole.narrow(dim, start, stop - start)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def labelled(label: int, rows: int, columns: int = 3) -> Tensor:
    """A tensor whose rows say where they come from: 100 x label + row."""
    return (100.0 * label + torch.arange(rows, dtype=torch.float32))[:, None].expand(rows, columns).clone()


def shards_of(rule: Rule, tensors: dict[str, Tensor], size: int) -> list[Tensor]:
    return [load_shard(rule, RecordingReader(tensors), list(tensors), rank, size) for rank in range(size)]


def test_qkv_rows_are_interleaved_per_query_group() -> None:
    """4 heads and 2 groups: q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = labelled(1, 8), labelled(2, 4), labelled(3, 4)  # two rows per head
    (whole,) = shards_of(FusedQKV(4, 2, 2, 3), {"q": q, "k": k, "v": v}, 1)
    rows = [100, 101, 102, 103, 200, 201, 300, 301, 104, 105, 106, 107, 202, 203, 302, 303]
    assert whole[:, 0].tolist() == rows


def test_gate_and_up_lie_one_after_the_other_on_each_rank() -> None:
    shards = shards_of(GateUp(4, 3), {"gate": labelled(1, 4), "up": labelled(2, 4)}, 2)
    assert [shard[:, 0].tolist() for shard in shards] == [[100, 101, 200, 201], [102, 103, 202, 203]]


def test_vocabulary_that_does_not_divide_is_padded_with_zeros() -> None:
    whole = labelled(1, 151)
    shards = shards_of(Split(0, (151, 3)), {"embedding": whole}, 4)
    assert [shard.shape[0] for shard in shards] == [38] * 4
    assert not shards[3][37:].any()
    assert shards[3][36, 0] == 250
    (merged,) = merge_shards(Split(0, (151, 3)), shards)
    assert torch.equal(merged, whole)


def test_rank_past_the_end_of_the_vocabulary_holds_padding_only() -> None:
    shards = shards_of(Split(0, (5, 3)), {"embedding": labelled(1, 5)}, 4)  # 2 + 2 + 1 + 0 rows
    assert [shard.shape[0] for shard in shards] == [2] * 4
    assert not shards[3].any()
    assert torch.equal(merge_shards(Split(0, (5, 3)), shards)[0], labelled(1, 5))


CASES: dict[str, tuple[Rule, dict[str, tuple[int, ...]]]] = {
    "qkv": (FusedQKV(8, 4, 2, 3), {"q": (16, 3), "k": (8, 3), "v": (8, 3)}),
    "qkv bias": (FusedQKV(8, 4, 2, None), {"q": (16,), "k": (8,), "v": (8,)}),
    "gate and up": (GateUp(8, 3), {"gate": (8, 3), "up": (8, 3)}),
    "columns": (Split(1, (3, 12)), {"down": (3, 12)}),
    "rows": (Split(0, (12, 3)), {"embedding": (12, 3)}),
    "padded rows": (Split(0, (151, 3)), {"embedding": (151, 3)}),
    "norm": (Replicated((7,)), {"norm": (7,)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(name: str, size: int, dtype: torch.dtype) -> None:
    rule, shapes = CASES[name]
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    shards = shards_of(rule, tensors, size)
    assert len({shard.shape for shard in shards}) == 1
    for merged, original in zip(merge_shards(rule, shards), tensors.values(), strict=True):
        assert merged.dtype == dtype
        assert torch.equal(merged, original)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qkv", [("q", 0, 8, 12), ("k", 0, 4, 6), ("v", 0, 4, 6)]),
        ("gate and up", [("gate", 0, 4, 6), ("up", 0, 4, 6)]),
        ("columns", [("down", 1, 6, 9)]),
        ("padded rows", [("embedding", 0, 76, 114)]),
        ("norm", [("norm", None, 0, 0)]),
    ],
)
def test_rank_reads_only_its_own_stretches(name: str, expected: list[Stretch]) -> None:
    """Rank 2 of 4."""
    rule, shapes = CASES[name]
    reader = RecordingReader({name: torch.zeros(shape) for name, shape in shapes.items()})
    load_shard(rule, reader, list(shapes), 2, 4)
    assert reader.asked == expected


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_table_has_every_tensor_of_transformers(checkpoint: Callable[..., Path], family: str, tied: bool) -> None:
    folder = checkpoint(family, tied=tied)
    arch = architecture_of(folder)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert hf_shapes(arch) == stored
    rows = list(parameter_table(arch))
    assert list(hf_shapes(arch)) == [name for row in rows for name in row.hf_names]  # the order of export
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert (row.layer is not None) == ("layers." in row.name)
        assert (row.expert is not None) == ("local_experts." in row.name)


def test_table_of_experts(checkpoint: Callable[..., Path]) -> None:
    rows = {row.name: row for row in parameter_table(architecture_of(checkpoint("mixtral")))}
    ours, theirs = "decoder.layers.2.mlp.", "model.layers.2.block_sparse_moe."
    assert rows[ours + "router.weight"].hf_names == (theirs + "gate.weight",)
    fc1, fc2 = (rows[f"{ours}experts.local_experts.10.linear_fc{i}.weight"] for i in (1, 2))
    assert fc1.hf_names == (theirs + "experts.10.w1.weight", theirs + "experts.10.w3.weight")
    assert fc2.hf_names == (theirs + "experts.10.w2.weight",)
    assert (fc1.layer, fc1.expert, fc2.layer, fc2.expert) == (2, 10, 2, 10)
    owners = [row.expert for row in rows.values() if row.expert is not None and row.layer == 2]
    assert owners == [expert for expert in range(12) for _ in range(2)]  # 10 after 9, not after 1


def shard_shapes(arch: Architecture, tensor: int, expert_tensor: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what Megatron's layers hold, by the ends of their names, from the dimensions alone."""
    hidden, head_dim, heads = arch.hidden_size, arch.head_dim, arch.num_heads
    ffn, expert_ffn, shared = (
        arch.ffn_size // tensor,
        arch.expert_ffn_size // expert_tensor,
        arch.shared_ffn_size // tensor,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "linear_proj.weight": (hidden, heads * arch.value_dim // tensor),
        "router.weight": (arch.num_experts, hidden),
        "router.expert_bias": (arch.num_experts,),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
        "shared_experts.linear_fc1.weight": (2 * shared, hidden),
        "shared_experts.linear_fc2.weight": (hidden, shared),
        "expert.linear_fc1.weight": (2 * expert_ffn, hidden),
        "expert.linear_fc2.weight": (hidden, expert_ffn),
        "input_layernorm.weight": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "final_layernorm.weight": (hidden,),
    }
    if latent := arch.latent:
        rank = latent.query_rank or 0
        return shapes | {
            "linear_q_proj.weight": (heads * head_dim // tensor, hidden),
            "linear_q_down_proj.weight": (rank, hidden),
            "q_layernorm.weight": (rank,),
            "linear_q_up_proj.weight": (heads * head_dim // tensor, rank),
            "linear_kv_down_proj.weight": (latent.kv_rank + latent.rope_dim, hidden),
            "kv_layernorm.weight": (latent.kv_rank,),
            "linear_kv_up_proj.weight": (heads * (latent.nope_dim + latent.value_dim) // tensor, latent.kv_rank),
        }
    qkv = (heads + 2 * arch.num_kv_heads) * head_dim // tensor
    norms = {f"{x}_layernorm.weight": (head_dim,) for x in "qk"}
    return shapes | norms | {"linear_qkv.weight": (qkv, hidden), "linear_qkv.bias": (qkv,)}


def shape_of(row: Parameter, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    name = row.name.replace(f"local_experts.{row.expert}.", "expert.")
    (shape,) = [shape for end, shape in shapes.items() if name.endswith("." + end)]
    return shape


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("tensor", "expert_tensor", "expert"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 4), (1, 3, 2), (2, 4, 4)]
)
def test_shards_of_all_ranks_make_the_checkpoint(
    checkpoint: Callable[..., Path], family: str, tied: bool, tensor: int, expert_tensor: int, expert: int
) -> None:
    """Each tensor comes back byte by byte, from exactly one parameter, of experts from exactly one owner."""
    folder = checkpoint(family, tied=tied)
    arch = architecture_of(folder)
    reader = RecordingReader(load_file(folder / "model.safetensors"))
    expected = shard_shapes(arch, tensor, expert_tensor)
    merged: dict[str, Tensor] = {}
    for owner in range(expert):
        per_owner = range(owner * arch.num_experts // expert, (owner + 1) * arch.num_experts // expert)
        for row in parameter_table(arch):
            if row.expert not in per_owner if row.expert is not None else owner != 0:
                continue
            size = tensor if row.expert is None else expert_tensor
            shards = [load_shard(row.rule, reader, row.hf_names, rank, size) for rank in range(size)]
            if row.name not in (EMBEDDING, OUTPUT):
                shape = shape_of(row, expected)
                assert [tuple(shard.shape) for shard in shards] == [shape] * size, row.name
            for name, whole in zip(row.hf_names, merge_shards(row.rule, shards), strict=True):
                assert name not in merged
                merged[name] = whole
    assert merged.keys() == reader.tensors.keys()
    for name, whole in merged.items():
        assert torch.equal(whole.view(torch.int32), reader.tensors[name].view(torch.int32)), name
