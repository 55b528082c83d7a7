"""Micro-batches: nothing lost, the same count everywhere, full, and balanced."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dapo_megatron.models.architecture import Architecture, LatentAttention
from dapo_megatron.models.flops import layer_parameters
from dapo_megatron.trainer.packing import CostModel, first_fit, plan_micro_batches

COST = CostModel(quadratic_length=8192)
# Qwen2.5-7B; 32B and Qwen3-30B-A3B differ from it as named below.
QWEN_7B = Architecture(
    hf_class="Qwen2ForCausalLM",
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=18944,
    vocab_size=152064,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=32768,
    tied_embeddings=False,
    qkv_bias=True,
)


def in_tokens(plan: list[list[list[int]]], lengths: list[int]) -> list[list[list[int]]]:
    """The plan as lengths instead of indices, in an order of its own."""
    return [sorted(sorted(lengths[i] for i in micro) for micro in rank) for rank in plan]


@st.composite
def lengths_and_budget(draw: st.DrawFn) -> tuple[list[int], int]:
    budget = draw(st.integers(1, 300))
    length = draw(
        st.sampled_from([st.just(1), st.just(budget), st.integers(1, budget), st.integers(1, -(-budget // 5))])
    )
    lengths = draw(st.lists(length, max_size=60))
    return lengths + [budget] * draw(st.integers(0, 1)), budget


@settings(deadline=None)
@given(
    lengths_and_budget(),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([5, 50, 8192]),
    st.randoms(use_true_random=False),
)
@example(([], 10), 3, 2, 8192, Random(0))
@example(([100] * 5 + [20] * 5, 100), 2, 1, 8192, Random(0))
@example(([34] * 30, 100), 3, 1, 8192, Random(0))
def test_every_plan(
    case: tuple[list[int], int], ranks: int, multiple: int, quadratic_length: int, random: Random
) -> None:
    lengths, budget = case
    cost = CostModel(quadratic_length)
    options = {"ranks": ranks, "budget": budget, "cost": cost, "multiple": multiple}
    plan = plan_micro_batches(lengths, **options)
    micro_batches = [micro for rank in plan for micro in rank]

    assert Counter(i for micro in micro_batches for i in micro) == Counter(range(len(lengths)))
    assert all(micro == sorted(micro) for micro in micro_batches)
    assert all(sum(lengths[i] for i in micro) <= budget for micro in micro_batches)
    (count,) = {len(rank) for rank in plan}
    assert len(plan) == ranks
    assert count % multiple == 0
    fewest = max(1, -(-sum(lengths) // (budget * ranks * multiple))) * multiple
    greedy = max(1, -(-len(first_fit(np.array(lengths, np.int64), budget)) // (ranks * multiple))) * multiple
    assert fewest <= count <= greedy
    for rank in plan:
        costs = [np.rint(cost.cost(np.array([lengths[i] for i in micro]))).sum() for micro in rank]
        assert costs == sorted(costs, reverse=True)

    assert plan_micro_batches(np.array(lengths, np.int32), **options) == plan
    shuffled = random.sample(lengths, len(lengths))
    assert in_tokens(plan_micro_batches(shuffled, **options), shuffled) == in_tokens(plan, lengths)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_long_beside_short(ranks: int) -> None:
    """Balanced by tokens alone, one of two ranks can need fewer micro-batches, and the other waits for it for ever."""
    plan = plan_micro_batches([100] * 5 + [20] * 5, ranks=ranks, budget=100, cost=COST)
    assert [len(rank) for rank in plan] == [-(-6 // ranks)] * ranks


def test_more_ranks_than_sequences() -> None:
    assert plan_micro_batches([3, 7], ranks=3, budget=8, cost=COST, multiple=2) == [[[1], []], [[0], []], [[], []]]
    assert plan_micro_batches([], ranks=2, budget=8, cost=COST) == [[[]], [[]]]


def test_a_sequence_above_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="30 tokens does not fit in a micro-batch of 29"):
        plan_micro_batches([5, 30], ranks=1, budget=29, cost=COST)


@pytest.mark.parametrize(
    "lengths", [[52, 31, 29, 29, 24, 19, 16], [58, 53, 51, 42, 28, 20, 18, 15, 9, 6], [56, 36, 35, 29, 23, 21]]
)
def test_fewer_than_first_fit(lengths: list[int]) -> None:
    """Not a token is wasted, where the greedy packing needs one micro-batch more."""
    fewest = sum(lengths) // 100
    assert len(first_fit(np.array(lengths), 100)) == fewest + 1
    assert [len(rank) for rank in plan_micro_batches(lengths, ranks=1, budget=100, cost=COST)] == [fewest]


def test_no_plan_with_the_fewest_micro_batches_exists() -> None:
    """180 tokens in three sequences of 60: two micro-batches of 100 would hold the tokens, but not the sequences."""
    assert len(plan_micro_batches([60, 60, 60], ranks=1, budget=100, cost=COST)[0]) == 3


def test_ranks_are_balanced_by_cost_not_by_tokens() -> None:
    """One sequence of 8,192 tokens costs as much as 14 of 1,024 tokens, which are 14,336."""
    plan = plan_micro_batches([1024] * 7 + [8192] + [1024] * 7, ranks=2, budget=16384, cost=COST)
    assert sorted(plan) == [[[*range(7), *range(8, 15)]], [[7]]]


@pytest.mark.parametrize("quadratic_length", [8_192, 65_000, 95_000])
@pytest.mark.parametrize("seed", [1, 2, 13])
def test_log_normal_lengths(seed: int, quadratic_length: int) -> None:
    """Median 2,000 and sigma 1.0: what reasoning models write. Seed 13 has a mini-batch that fills 99.996 %."""
    ranks, budget, cost = 16, 24_576, CostModel(quadratic_length)
    batch = np.minimum(np.random.default_rng(seed).lognormal(np.log(2000), 1.0, 8192).astype(int) + 1, 20_480)
    for lengths in (batch, *np.split(batch, 16)):
        plan = plan_micro_batches(lengths, ranks=ranks, budget=budget, cost=cost)
        bound = -(-int(lengths.sum()) // (budget * ranks))
        assert len(plan[0]) == bound
        assert max(lengths[micro].sum() for rank in plan for micro in rank) <= budget
        costs = np.array([[cost.cost(lengths[micro]).sum() for micro in rank] for rank in plan])
        assert costs.sum(1).max() <= 1.011 * costs.sum(1).mean()
        in_step = costs.max(0).sum() / costs.sum(1).mean()  # where ranks wait for each other in every micro-batch
        assert in_step <= (1.3 if quadratic_length == 8_192 else 1.06)
        if lengths is batch:
            assert lengths.sum() >= 0.97 * budget * ranks * bound


def test_cost() -> None:
    assert CostModel(100.0).cost(np.array([0, 10, 100], np.int32)).tolist() == [0.0, 11.0, 200.0]
    assert CostModel(1e5).cost(np.array([100_000], np.int32)).tolist() == [200_000.0]  # no overflow


def test_cost_of_a_model() -> None:
    """Attention's weights and the MLP's, over the width of all heads."""
    q, kv, mlp = 3584 * 3584, 3584 * 512, 3 * 3584 * 18944
    assert CostModel.of(QWEN_7B).quadratic_length == (2 * q + 2 * kv + mlp) / 3584
    qwen_32b = replace(QWEN_7B, hidden_size=5120, num_heads=40, num_kv_heads=8, ffn_size=27648)
    assert CostModel.of(qwen_32b).quadratic_length == pytest.approx(95_232)


def test_cost_of_a_mixture_counts_active_experts() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768; its `ffn_size` is not used by any layer."""
    mixture = replace(
        QWEN_7B,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_size=11008,
        num_experts=128,
        experts_per_token=8,
        expert_ffn_size=768,
    )
    attention, experts = 2 * 2048 * (4096 + 512), 8 * 3 * 2048 * 768
    assert CostModel.of(mixture).quadratic_length == (attention + experts) / 4096


def test_cost_of_latent_attention_counts_both_sizes_of_its_heads() -> None:
    """DeepSeek-V3's queries and keys have 192 numbers, its values 128: a position costs as 160 of each."""
    latent = LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    arch = replace(
        QWEN_7B, hf_class="DeepseekV3ForCausalLM", num_heads=128, num_kv_heads=128, head_dim=192, latent=latent
    )
    assert CostModel.of(arch).quadratic_length == layer_parameters(arch) / (128 * 160)
