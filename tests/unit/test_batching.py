"""The plan that cuts a batch into micro-batches, and the packed tensors made from it."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.errors import UserError
from dapo_megatron.trainer.batching import Batch, MicroBatch, build_batch, plan_batch, share_of
from dapo_megatron.types import BatchHeader, TokenBlock
from tests.batches import make_batch, rows_of

CPU = torch.device("cpu")
STREAM = np.arange(1000, dtype=np.int64)


def header_of(prompt_lengths: list[int], response_lengths: list[int]) -> BatchHeader:
    """A batch of len(response_lengths) / len(prompt_lengths) responses per group."""
    count, groups = len(response_lengths), len(prompt_lengths)
    return BatchHeader(
        step=1,
        groups=np.repeat(np.arange(groups), count // groups).astype(np.int32),
        draws=np.arange(groups, dtype=np.int32),
        prompt_ids=np.arange(groups, dtype=np.int32),
        prompt_lengths=np.array(prompt_lengths, np.int32),
        response_lengths=np.array(response_lengths, np.int32),
        rewards=np.zeros(count, np.float32),
        correct=np.zeros(count, bool),
        truncated=np.zeros(count, bool),
        versions=np.zeros((count, 2), np.int32),
    )


@st.composite
def headers(draw: st.DrawFn) -> BatchHeader:
    groups, samples = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    prompts = draw(st.lists(st.integers(1, 20), min_size=groups, max_size=groups))
    lengths = draw(st.lists(st.integers(0, 20), min_size=groups * samples, max_size=groups * samples))
    return header_of(prompts, lengths)


@settings(deadline=None)
@given(headers(), st.integers(1, 4), st.integers(1, 4), st.integers(40, 200))
def test_plan(header: BatchHeader, groups_per_update: int, data_ranks: int, budget: int) -> None:
    group_size = header.num_responses // len(header.prompt_lengths)
    options = {
        "mini_batch": groups_per_update * group_size,
        "data_ranks": data_ranks,
        "micro_batch_tokens": budget,
    }
    plans = plan_batch(header, **options)
    assert plan_batch(header, **options)[0].micro_batches == plans[0].micro_batches  # every rank's own computation

    placed = Counter(r for plan in plans for rank in plan.micro_batches for micro in rank for r in micro)
    assert placed == Counter(np.flatnonzero(header.response_lengths).tolist())  # exactly once; empty ones never
    assert [r for plan in plans for r in plan.responses] == list(range(header.num_responses))  # in draw order
    for plan in plans:
        assert len(plan.micro_batches) == data_ranks
        assert len({len(rank) for rank in plan.micro_batches}) == 1  # else ranks wait for each other for ever
        for micro in (micro for rank in plan.micro_batches for micro in rank):
            assert set(micro) <= set(plan.responses.tolist())
            assert header.sequence_lengths[micro].sum() <= budget
    sizes = [len(plan.responses) for plan in plans]
    assert all(size % group_size == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= group_size
    assert max(sizes) <= options["mini_batch"]


@pytest.mark.parametrize("data_ranks", [1, 2, 5])
def test_long_and_short_sequences_give_equal_counts(data_ranks: int) -> None:
    """Five sequences of 100 tokens beside five of 20, at 100 tokens a micro-batch."""
    header = header_of([10, 10], [90] * 5 + [10] * 5)
    (plan,) = plan_batch(header, mini_batch=10, data_ranks=data_ranks, micro_batch_tokens=100)
    counts = [len(rank) for rank in plan.micro_batches]
    assert counts == [-(-6 // data_ranks)] * data_ranks  # 600 tokens


def test_work_is_balanced_over_ranks() -> None:
    header = header_of([10] * 8, [90, 10, 10, 10] * 8)
    (plan,) = plan_batch(header, mini_batch=32, data_ranks=4, micro_batch_tokens=500)
    loads = [sum(int(header.sequence_lengths[r]) for micro in rank for r in micro) for rank in plan.micro_batches]
    assert max(loads) - min(loads) <= 20


def test_more_ranks_than_responses() -> None:
    (plan,) = plan_batch(header_of([5], [3, 0]), mini_batch=2, data_ranks=3, micro_batch_tokens=64)
    assert plan.micro_batches == [[[0]], [[]], [[]]]


def test_empty_batch_has_no_updates() -> None:
    none = np.zeros(0, np.int32)
    header = replace(header_of([1], [1]), groups=none, prompt_lengths=none, response_lengths=none)
    assert plan_batch(header, mini_batch=4, data_ranks=2, micro_batch_tokens=8) == []


def test_sequence_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"training\.micro_batch_tokens \(29\).* 30 tokens"):
        plan_batch(header_of([10], [20, 5]), mini_batch=2, data_ranks=1, micro_batch_tokens=29)


def build(data_rank: int = 0, data_ranks: int = 1, mini_batch: int = 16) -> tuple[BatchHeader, TokenBlock, Batch]:
    header, tokens = make_batch(STREAM)
    plans = plan_batch(header, mini_batch=mini_batch, data_ranks=data_ranks, micro_batch_tokens=96)
    share = share_of(plans, data_rank)
    return header, tokens, build_batch(header, plans, select(tokens, share), data_rank=data_rank, device=CPU)


def select(tokens: TokenBlock, members: np.ndarray) -> TokenBlock:
    """The part of a block that a rank fetches."""
    prompts, responses, log_probs = zip(*(rows_of(tokens)[r] for r in members.tolist()), strict=True)
    return TokenBlock(
        responses=members,
        prompt_lengths=tokens.prompt_lengths[members],
        response_lengths=tokens.response_lengths[members],
        prompt_tokens=np.concatenate(prompts),
        response_tokens=np.concatenate(responses),
        rollout_log_probs=np.concatenate(log_probs),
    )


def sequences(micro: MicroBatch) -> list[list[int]]:
    """The packed sequences of a micro-batch."""
    ends = micro.packed.cu_seqlens_q.tolist()
    return [micro.input_ids[0, start:stop].tolist() for start, stop in itertools.pairwise(ends)]


def test_micro_batches_hold_each_sequence_and_its_targets() -> None:
    _, tokens, batch = build()
    rows = rows_of(tokens)
    seen = []
    assert len(batch.micro_batches()) > 1
    for micro in batch.micro_batches():
        members = list(dict.fromkeys(micro.responses.tolist()))
        seen += members
        prompts, responses, log_probs = zip(*(rows[r] for r in members), strict=True)
        expected = [[*prompt, *response[:-1]] for prompt, response in zip(prompts, responses, strict=True)]
        assert sequences(micro) == expected  # the last token is only a target
        assert [len(sequence) for sequence in expected] == sorted(len(sequence) for sequence in expected)
        assert micro.targets.tokens.tolist() == np.concatenate(responses).tolist()
        assert micro.responses.tolist() == [r for r in members for _ in rows[r][1]]
        assert micro.rollout_log_probs.tolist() == np.concatenate(log_probs).tolist()
        before = [token for prompt, response, _ in map(rows.get, members) for token in (prompt[-1], *response[:-1])]
        assert micro.input_ids[0, micro.targets.index].tolist() == before  # each target's predecessor
        assert micro.input_ids.dtype == micro.targets.tokens.dtype == torch.int64
    assert sorted(seen) == [r for r in range(16) if r != 3]  # response 3 is empty


def test_ranks_share_the_batch() -> None:
    header, _, whole = build()
    parts = [build(data_rank=rank, data_ranks=2)[2] for rank in range(2)]
    members = [r for part in parts for micro in part.micro_batches() for r in micro.responses.unique().tolist()]
    assert sorted(members) == sorted(r for micro in whole.micro_batches() for r in micro.responses.unique().tolist())
    for part in parts:
        assert [mini.num_tokens for mini in part.mini_batches()] == [int(header.response_lengths.sum())]


def test_mini_batches_count_their_own_tokens() -> None:
    header, _, batch = build(mini_batch=8)
    assert batch.num_updates == 2
    expected = [int(header.response_lengths[:8].sum()), int(header.response_lengths[8:].sum())]
    assert [mini.num_tokens for mini in batch.mini_batches()] == expected


def test_rank_without_responses_gets_a_token_of_padding() -> None:
    header = header_of([5], [3])
    tokens = TokenBlock(*(np.zeros(0, dtype) for dtype in (np.int32,) * 5), np.zeros(0, np.float32))
    plans = plan_batch(header, mini_batch=1, data_ranks=2, micro_batch_tokens=64)
    (micro,) = build_batch(header, plans, tokens, data_rank=1, device=CPU).micro_batches()
    assert micro.input_ids.tolist() == [[0]]
    assert micro.input_ids.dtype == torch.int64
    assert micro.packed.cu_seqlens_q.tolist() == [0, 1]
    assert len(micro.targets.index) == len(micro.targets.tokens) == len(micro.responses) == 0


def test_advantages_and_old_log_probs_reach_their_tokens() -> None:
    _, _, batch = build()
    batch.set_advantages(torch.arange(16.0))
    values = [torch.rand(len(micro.responses)) for micro in batch.micro_batches()]
    batch.set_old_log_probs(values)
    for micro, old in zip(batch.micro_batches(), values, strict=True):
        assert micro.advantages.tolist() == micro.responses.tolist()
        assert micro.old_log_probs is old
    with pytest.raises(ValueError, match="zip"):
        batch.set_old_log_probs(values[1:])
