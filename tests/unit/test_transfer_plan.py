"""Plans of weight pushes: proved in random layouts, refused when one slice of them is wrong."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dapo_megatron.cli import main
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture, LatentAttention, SigmoidRouter
from dapo_megatron.models.layout import check_layout, check_ranks
from dapo_megatron.models.table import hf_shapes, parameter_table
from dapo_megatron.sync.plan import (
    ServerLayout,
    Source,
    TransferPlan,
    check_server,
    compile_plan,
    expert_worker,
    stage_layers,
)
from dapo_megatron.sync.proof import PlanError, prove
from dapo_megatron.sync.wire import Bucket, Group, Stretch
from tests.models import REPOSITORY

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 4,
    "ffn_size": 32,
    "vocab_size": 150,
    "norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_positions": 64,
    "tied_embeddings": False,
    "qkv_bias": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 12, "experts_per_token": 2, "expert_ffn_size": 16}
LATENT: dict[str, Any] = EXPERTS | {
    "num_kv_heads": 8,
    "latent": LatentAttention(12, 8, 4, 4, 4),
    "sigmoid_router": SigmoidRouter(1, 1, 1.0),
    "dense_layers": 1,
    "shared_ffn_size": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "GemmaForCausalLM": {},
    "Qwen3MoeForCausalLM": EXPERTS | {"qk_norm": True},
    "MixtralForCausalLM": EXPERTS,
    "DeepseekV3ForCausalLM": LATENT,
}


def architecture(family: str, **changes: Any) -> Architecture:
    return Architecture(hf_class=family, **(BASE | FAMILIES[family] | changes))


Case = tuple[Architecture, ParallelConfig, int, ServerLayout, str, int]
SIZES = st.sampled_from([1, 2, 4])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    changes: dict[str, Any] = {
        "num_layers": draw(st.integers(2, 6)),
        "vocab_size": draw(st.integers(1, 300)),
        "tied_embeddings": draw(st.booleans()),
    }
    if not FAMILIES[family].get("latent"):
        changes["num_kv_heads"] = draw(st.sampled_from([1, 2, 4, 8]))
    arch = architecture(family, **changes)
    pipeline = draw(st.integers(1, min(3, arch.num_layers)))
    virtual = draw(st.integers(1, arch.num_layers // pipeline)) if pipeline > 1 else 1
    cuts = sorted(draw(st.permutations(range(1, arch.num_layers)))[: pipeline * virtual - 1])
    tensor, context = draw(st.sampled_from([size for size in (1, 2, 4) if arch.num_kv_heads % size == 0])), draw(SIZES)
    expert, expert_tensor = (draw(st.sampled_from([1, 2, 3, 4])), draw(SIZES)) if arch.num_experts else (1, 1)
    parallel = ParallelConfig.model_validate(
        {
            "tensor": tensor,
            "sequence": tensor > 1,
            "pipeline": pipeline,
            "virtual_pipeline": virtual,
            "pipeline_layers": [stop - start for start, stop in pairwise([0, *cuts, arch.num_layers])],
            "context": context,
            "expert": expert,
            "expert_tensor": expert_tensor,
        }
    )
    ranks = pipeline * math.lcm(tensor * context, expert * expert_tensor) * draw(st.integers(1, 2))
    check_layout(arch, parallel, "model")
    check_ranks(parallel, ranks, "ranks")
    stages = draw(st.integers(1, min(3, arch.num_layers)))
    server = ServerLayout(draw(st.sampled_from([1, 2, 4, 8])), stages, bool(arch.num_experts) and draw(st.booleans()))
    return arch, parallel, ranks, server, draw(st.sampled_from(["float32", "bfloat16"])), draw(st.integers(1, 1 << 16))


def compiled(case: Case) -> TransferPlan:
    arch, parallel, ranks, server, dtype, bucket_bytes = case
    return compile_plan(arch, parallel, ranks, server, dtype=dtype, bucket_bytes=bucket_bytes)


def check(plan: TransferPlan, case: Case) -> None:
    arch, parallel, ranks, _, dtype, _ = case
    prove(plan, arch, parallel, ranks, dtype=dtype)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_plans_of_all_layouts_are_proved(case: Case) -> None:
    plan = compiled(case)
    check(plan, case)
    arch, parallel, _, server, _, bucket_bytes = case
    assert plan.sources.keys() == hf_shapes(arch).keys()
    assert parallel.pipeline <= len(plan.senders) <= parallel.pipeline * parallel.expert
    for turn in plan.turns:
        assert len(turn.rows) == 1 or sum(s.nbytes for b in turn.buckets for s in b.stretches) <= bucket_bytes
    if server.workers == 1:
        assert len(plan.groups) == len(plan.senders)  # one group for each
        assert all(stretch.whole for bucket in plan.buckets for stretch in bucket.stretches)
    covered = {name: set[int]() for name in plan.sources}
    for bucket in plan.buckets:
        for stretch in bucket.stretches:
            covered[stretch.name] |= set(range(stretch.start, stretch.stop))
    for row in parameter_table(arch):
        for name, shape in zip(row.hf_names, row.rule.hf_shapes, strict=True):
            assert covered[name] == set(range(shape[row.rule.dim])), name


# --- what is refused ------------------------------------------------------------------------------------------------

Slice = tuple[int, int, int]
"""Turn, bucket and stretch."""


def slices(plan: TransferPlan) -> list[Slice]:
    return [
        (t, b, s)
        for t, turn in enumerate(plan.turns)
        for b, bucket in enumerate(turn.buckets)
        for s, _ in enumerate(bucket.stretches)
    ]


def with_stretches(plan: TransferPlan, where: Slice, stretches: list[Stretch]) -> TransferPlan:
    """The plan, with one stretch replaced by others."""
    t, b, s = where
    turn = plan.turns[t]
    bucket = turn.buckets[b]
    changed = replace(bucket, stretches=(*bucket.stretches[:s], *stretches, *bucket.stretches[s + 1 :]))
    return with_bucket(plan, where, changed)


def with_bucket(plan: TransferPlan, where: Slice, bucket: Bucket) -> TransferPlan:
    t, b, _ = where
    turn = plan.turns[t]
    buckets = tuple(bucket if i == b else old for i, old in enumerate(turn.buckets) if i != b or bucket.stretches)
    return replace(plan, turns=(*plan.turns[:t], replace(turn, buckets=buckets), *plan.turns[t + 1 :]))


def shifted(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [old._replace(start=old.start + 1, stop=old.stop + 1)])


def shortened(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [old._replace(stop=old.stop - 1)])


def missing(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [])


def doubled(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [old, old])


def overlapping(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    middle = (old.start + old.stop) // 2
    return with_stretches(plan, where, [old._replace(stop=middle + 1), old._replace(start=middle)])


def other_dtype(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [old._replace(dtype="float16")])


def other_name(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [old._replace(name=old.name + ".old")])


def other_shape(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_stretches(plan, where, [old._replace(shape=(*old.shape, 1))])


def other_sender(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    return with_bucket(plan, where, replace(bucket, group=Group(bucket.group.sender + 1, bucket.group.workers)))


def other_sender_of_the_turn(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    turn = plan.turns[where[0]]
    sender = turn.sender + 1
    moved = tuple(replace(b, group=Group(sender, b.group.workers)) for b in turn.buckets)
    turns = list(plan.turns)
    turns[where[0]] = replace(turn, sender=sender, buckets=moved)
    return replace(plan, turns=tuple(turns))


def other_workers(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    workers = tuple((worker + 1) % plan.server.workers for worker in bucket.group.workers)
    assume(set(workers) != set(bucket.group.workers))
    return with_bucket(plan, where, replace(bucket, group=Group(bucket.group.sender, workers)))


def other_source(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    first, *rest = plan.sources[old.name]
    moved = (Source(first.rank + 1, first.start, first.stop), *rest)
    return replace(plan, sources=plan.sources | {old.name: moved})


def shifted_source(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    first, *rest = plan.sources[old.name]
    moved = (Source(first.rank, first.start + 1, first.stop), *rest)
    return replace(plan, sources=plan.sources | {old.name: moved})


def swapped_turns(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    assume(len(plan.turns) > 1)
    turns, t = list(plan.turns), min(where[0], len(plan.turns) - 2)
    turns[t], turns[t + 1] = turns[t + 1], turns[t]
    return replace(plan, turns=tuple(turns))


def swapped_stretches(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    assume(len(bucket.stretches) > 1)
    return with_bucket(plan, where, replace(bucket, stretches=bucket.stretches[::-1]))


def unsent_row(plan: TransferPlan, where: Slice, old: Stretch, bucket: Bucket) -> TransferPlan:
    turns, turn = list(plan.turns), plan.turns[where[0]]
    turns[where[0]] = replace(turn, rows=turn.rows[:-1])
    assume(len(turn.rows) > 1)
    return replace(plan, turns=tuple(turns))


FAULTS = [shifted, shortened, missing, doubled, overlapping, other_dtype, other_name, other_shape, other_sender,
          other_sender_of_the_turn, other_workers, other_source, shifted_source, swapped_turns, swapped_stretches,
          unsent_row]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_one_wrong_slice_is_refused(fault: Callable[..., TransferPlan], data: st.DataObject) -> None:
    case = data.draw(cases())
    plan = compiled(case)
    where = data.draw(st.sampled_from(slices(plan)))
    bucket = plan.turns[where[0]].buckets[where[1]]
    old = bucket.stretches[where[2]]
    wrong = fault(plan, where, old, bucket)
    with pytest.raises(PlanError) as caught:
        check(wrong, case)
    if fault not in (swapped_turns, swapped_stretches, unsent_row, other_sender_of_the_turn, other_workers,
                     other_sender):  # fmt: skip
        assert old.name in str(caught.value)


def test_error_names_tensor_worker_and_stretch() -> None:
    case: Case = architecture("LlamaForCausalLM"), ParallelConfig(), 1, ServerLayout(2), "float32", 1 << 12
    plan = compiled(case)
    name = "model.layers.1.mlp.down_proj.weight"
    where = next(w for w in slices(plan) if (s := stretch_at(plan, w)).name == name and s.start == 16)
    with pytest.raises(PlanError, match=rf"worker 1 does not get {name}\[31:32 of dim 1\], which it needs"):
        check(with_stretches(plan, where, [stretch_at(plan, where)._replace(stop=31)]), case)
    with pytest.raises(PlanError, match=rf"worker 1 gets bytes that it does not need: {name}\[15:32 of dim 1\], "):
        check(with_stretches(plan, where, [stretch_at(plan, where)._replace(start=15)]), case)


def stretch_at(plan: TransferPlan, where: Slice) -> Stretch:
    t, b, s = where
    return plan.turns[t].buckets[b].stretches[s]


# --- who gets what --------------------------------------------------------------------------------------------------


def of(plan: TransferPlan, name: str) -> list[tuple[int, int, tuple[int, ...]]]:
    return [
        (stretch.start, stretch.stop, bucket.group.workers)
        for bucket in plan.buckets
        for stretch in bucket.stretches
        if stretch.name == name
    ]


def plan_for(arch: Architecture, server: ServerLayout, ranks: int = 1, **parallel: Any) -> TransferPlan:
    case: Case = arch, ParallelConfig.model_validate(parallel), ranks, server, "bfloat16", 1 << 20
    plan = compiled(case)
    check(plan, case)
    return plan


def test_key_value_heads_are_shared_by_workers_when_there_are_fewer() -> None:
    plan = plan_for(architecture("LlamaForCausalLM", num_kv_heads=2), ServerLayout(4))
    layer = "model.layers.0.self_attn."
    assert of(plan, layer + "k_proj.weight") == [(0, 4, (0, 1)), (4, 8, (2, 3))]
    assert of(plan, layer + "q_proj.weight") == [(8 * i, 8 * i + 8, (i,)) for i in range(4)]
    assert of(plan, layer + "o_proj.weight") == [(8 * i, 8 * i + 8, (i,)) for i in range(4)]
    assert of(plan, "model.layers.0.input_layernorm.weight") == [(0, 16, (0, 1, 2, 3))]


def test_padded_vocabulary_ends_where_the_model_does() -> None:
    plan = plan_for(architecture("LlamaForCausalLM"), ServerLayout(4))  # 150 rows, padded to 192
    assert of(plan, "lm_head.weight") == [(0, 48, (0,)), (48, 96, (1,)), (96, 144, (2,)), (144, 150, (3,))]
    plan = plan_for(architecture("LlamaForCausalLM", vocab_size=130), ServerLayout(4))
    assert of(plan, "lm_head.weight")[-1] == (96, 130, (2,))  # the last worker has padding alone


def test_tied_embeddings_reach_the_first_and_the_last_stage_in_one_broadcast() -> None:
    plan = plan_for(architecture("LlamaForCausalLM", tied_embeddings=True), ServerLayout(2, 2), 2, pipeline=2)
    assert of(plan, "model.embed_tokens.weight") == [(0, 96, (0, 2)), (96, 150, (1, 3))]
    assert of(plan, "model.norm.weight") == [(0, 16, (2, 3))]
    assert plan.sources["model.embed_tokens.weight"] == (Source(0, 0, 150),)
    plan = plan_for(architecture("LlamaForCausalLM"), ServerLayout(2, 2))
    assert of(plan, "model.embed_tokens.weight") == [(0, 96, (0,)), (96, 150, (1,))]
    assert of(plan, "lm_head.weight") == [(0, 96, (2,)), (96, 150, (3,))]


def test_experts_come_from_their_owners_and_go_to_theirs() -> None:
    arch = architecture("Qwen3MoeForCausalLM")
    plan = plan_for(arch, ServerLayout(2, 1, True), 4, expert=2, expert_tensor=2)
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    assert of(plan, name.format(5)) == [(0, 16, (0,))]
    assert of(plan, name.format(6)) == [(0, 16, (1,))]
    assert plan.sources[name.format(6)] == (Source(2, 0, 8), Source(3, 8, 16))
    assert plan.senders == (0, 2)
    split = plan_for(arch, ServerLayout(2), 4, expert=2, expert_tensor=2)
    assert of(split, name.format(6)) == [(0, 8, (0,)), (8, 16, (1,))]


def test_uneven_experts_and_layers_follow_vllm() -> None:
    assert [expert_worker(expert, 10, 4) for expert in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    counts = {(layers, stages): [len(r) for r in stage_layers(layers, stages)]
              for layers, stages in [(7, 2), (7, 3), (10, 4), (11, 4), (4, 1)]}  # fmt: skip
    assert counts == {(7, 2): [4, 3], (7, 3): [2, 3, 2], (10, 4): [2, 3, 3, 2], (11, 4): [3, 3, 3, 2], (4, 1): [4]}


def test_ranks_share_the_rows_that_they_hold() -> None:
    arch = architecture("LlamaForCausalLM", vocab_size=5)
    plan = plan_for(arch, ServerLayout(), 8, tensor=4)
    rows = {rank: [row.name for turn in plan.turns for row in plan.shared_rows(rank, turn)] for rank in range(8)}
    assert "embedding.word_embeddings.weight" in rows[3]  # padding alone, but it takes part in the gathering
    assert "decoder.final_layernorm.weight" in rows[0]
    assert "decoder.final_layernorm.weight" not in rows[1]
    assert rows[4] == []  # data parallel copies
    assert plan.senders == (0,)


@pytest.mark.parametrize(
    ("family", "server", "message"),
    [
        ("LlamaForCausalLM", ServerLayout(3), "fleet.tensor=3 does not divide 8 attention heads"),
        ("LlamaForCausalLM", ServerLayout(1, 5), "fleet.pipeline=5 exceeds the 4 layers"),
        ("LlamaForCausalLM", ServerLayout(2, 1, True), "fleet.expert_parallel=true needs a model with experts"),
    ],
)
def test_layouts_that_servers_cannot_have_are_refused(family: str, server: ServerLayout, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_for(architecture(family), server)


@pytest.mark.parametrize(
    ("changes", "server", "message"),
    [
        ({"num_heads": 12, "ffn_size": 36}, ServerLayout(6), "fleet.tensor=6 must divide the 4 key/value heads"),
        ({"ffn_size": 33}, ServerLayout(2), "fleet.tensor=2 does not divide the MLP size 33"),
        (
            {"num_heads": 3, "num_kv_heads": 3, "ffn_size": 33, "vocab_size": 64},
            ServerLayout(3),
            "does not divide the padded vocabulary",
        ),
    ],
)
def test_sizes_that_servers_cannot_split_are_refused(
    changes: dict[str, Any], server: ServerLayout, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_server(architecture("LlamaForCausalLM", **changes), server)


def test_sizes_of_experts_are_checked_where_they_are_split() -> None:
    arch = architecture("Qwen3MoeForCausalLM", expert_ffn_size=17)
    with pytest.raises(UserError, match="the MLP size 17 of each expert"):
        check_server(arch, ServerLayout(2))
    check_server(arch, ServerLayout(2, 1, True))
    with pytest.raises(UserError, match=r"spreads 3 experts over fleet\.tensor=4 workers"):
        check_server(replace(arch, num_experts=3), ServerLayout(4, 1, True))
    with pytest.raises(UserError, match="the MLP size 15 of the shared experts"):
        check_server(architecture("DeepseekV3ForCausalLM", shared_ffn_size=15), ServerLayout(2))


def test_plans_of_large_models_are_proved() -> None:
    dense = {"num_layers": 64, "hidden_size": 5120, "num_heads": 40, "num_kv_heads": 8, "head_dim": 128,
             "ffn_size": 27648, "vocab_size": 152064}  # fmt: skip
    plan = plan_for(architecture("Qwen2ForCausalLM", **dense), ServerLayout(4), 128, tensor=4, pipeline=4)
    assert plan.num_tensors == 771
    assert plan.senders == (0, 32, 64, 96)
    experts = {"num_layers": 48, "hidden_size": 2048, "num_heads": 32, "num_experts": 128, "experts_per_token": 8,
               "expert_ffn_size": 768}  # fmt: skip
    arch = architecture("Qwen3MoeForCausalLM", **experts)
    plan = plan_for(arch, ServerLayout(4, 1, True), 32, tensor=2, sequence=True, pipeline=2, expert=8)
    assert len(plan.senders) == 16


def test_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    example = REPOSITORY / "examples" / "qwen2.5_32b_128gpu" / "bf16.yaml"
    layout = ["parallel.tensor=8", "parallel.pipeline=2", "fleet.tensor=2", "fleet.dtype=bfloat16"]
    assert main(["plan", str(example), "--sync", "--nproc", "8", "--nnodes", "16", *layout]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    senders = [line for line in lines if line[:1] == ["64"]]
    assert [line[:4] for line in senders] == [["64", "31,246.1", "386", "3"]]
    workers = [line for line in lines if line[:3] == ["1", "0", "1"]]
    assert [line[3:5] for line in workers] == [["31,246.7", "771"]]
    assert any("771 tensors" in " ".join(line) for line in lines)


def test_plan_of_shared_gpus_has_a_sender_for_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    example = REPOSITORY / "examples" / "qwen2.5_32b_128gpu" / "bf16.yaml"
    shared = ["fleet.mode=colocated", "fleet.urls_file=null", "fleet.tensor=2", "fleet.dtype=bfloat16"]
    assert main(["plan", str(example), "--sync", "--nproc", "8", "--nnodes", "4", *shared]) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    senders = [line for line in lines if len(line) == 5 and line[0].isdigit()]
    assert [line[:4] for line in senders] == [[str(rank), "31,246.7", "771", "1"] for rank in range(32)]
    workers = [line for line in lines if len(line) == 6 and line[0].isdigit()]
    assert [line[:5] for line in workers] == [[str(n), "0", str(n), "31,246.7", "771"] for n in range(2)]


def test_plan_without_sync_is_that_of_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    example = REPOSITORY / "examples" / "qwen2.5_32b_128gpu" / "bf16.yaml"
    assert main(["plan", str(example), "--nproc", "8", "--nnodes", "16"]) == 0
    assert "rank node    tp   cp" in capsys.readouterr().out
