"""The plan that cuts a batch into micro-batches, and the packed tensors made from it."""

import itertools
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm.aggregation import Aggregation, aggregate
from dapo_megatron.errors import UserError
from dapo_megatron.models.families import llama
from dapo_megatron.trainer.batching import Batch, MicroBatch, PackingRules, build_batch, plan_batch, share_of
from dapo_megatron.trainer.packing import CostModel
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.types import BatchHeader, TokenBlock
from tests.batches import make_batch, make_config, rows_of
from tests.unit.config_helpers import LLAMA

CPU = torch.device("cpu")
VOCAB = 1000
RULES = PackingRules(
    mini_batch=16,
    filter_truncated=False,
    micro_batch_tokens=96,
    data_ranks=1,
    context=1,
    sequence_multiple=1,
    total_multiple=1,
    count_multiple=1,
    same_length=False,
    cost=CostModel(8192.0),
    backend="local",
)


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
    )


@st.composite
def headers(draw: st.DrawFn) -> BatchHeader:
    groups, samples = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    prompts = draw(st.lists(st.integers(1, 20), min_size=groups, max_size=groups))
    lengths = draw(st.lists(st.integers(0, 20), min_size=groups * samples, max_size=groups * samples))
    return header_of(prompts, lengths)


@settings(deadline=None)
@given(
    header=headers(),
    groups_per_update=st.integers(1, 4),
    data_ranks=st.integers(1, 4),
    budget=st.integers(48, 200),
    sequence_multiple=st.sampled_from([1, 4, 12]),
    count_multiple=st.sampled_from([1, 2, 3]),
)
def test_plan(
    header: BatchHeader,
    groups_per_update: int,
    data_ranks: int,
    budget: int,
    sequence_multiple: int,
    count_multiple: int,
) -> None:
    group_size = header.num_responses // len(header.prompt_lengths)
    rules = replace(
        RULES,
        mini_batch=groups_per_update * group_size,
        data_ranks=data_ranks,
        micro_batch_tokens=budget,
        sequence_multiple=sequence_multiple,
        count_multiple=count_multiple,
    )
    plans = plan_batch(header, rules)
    assert plan_batch(header, rules)[0].micro_batches == plans[0].micro_batches  # every rank's own computation

    placed = Counter(r for plan in plans for rank in plan.micro_batches for micro in rank for r in micro)
    assert placed == Counter(np.flatnonzero(header.response_lengths).tolist())  # exactly once; empty ones never
    assert [r for plan in plans for r in plan.responses] == list(range(header.num_responses))  # in draw order
    for plan in plans:
        assert len(plan.micro_batches) == data_ranks
        (count,) = {len(rank) for rank in plan.micro_batches}  # else ranks wait for each other for ever
        assert count % count_multiple == 0
        for micro in (micro for rank in plan.micro_batches for micro in rank):
            assert set(micro) <= set(plan.responses.tolist())
            inputs = header.sequence_lengths[micro] - 1
            assert (-(-inputs // sequence_multiple) * sequence_multiple).sum() <= budget
    sizes = [len(plan.responses) for plan in plans]
    assert all(size % group_size == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= group_size
    assert max(sizes) <= rules.mini_batch


@pytest.mark.parametrize("data_ranks", [1, 2, 5])
def test_long_and_short_sequences_give_equal_counts(data_ranks: int) -> None:
    """Five sequences of 100 tokens beside five of 20, at 100 tokens a micro-batch."""
    header = header_of([10, 10], [91] * 5 + [11] * 5)
    (plan,) = plan_batch(header, replace(RULES, data_ranks=data_ranks, micro_batch_tokens=100))
    counts = [len(rank) for rank in plan.micro_batches]
    assert counts == [-(-6 // data_ranks)] * data_ranks  # 600 tokens


def test_ranks_share_the_cost_not_the_number_of_responses() -> None:
    """Where attention dominates, two sequences of 400 tokens cost as much as 32 of 100."""
    header = header_of([10], [391] * 2 + [91] * 32)
    rules = replace(RULES, mini_batch=34, data_ranks=3, micro_batch_tokens=4096, cost=CostModel(1e-3))
    (plan,) = plan_batch(header, rules)
    sizes = sorted(sum(map(len, rank)) for rank in plan.micro_batches)
    lengths = header.sequence_lengths - 1
    costs = [sum(int(lengths[r]) ** 2 for micro in rank for r in micro) for rank in plan.micro_batches]
    assert max(costs) == 220_000  # of 640,000: 213,333 each cannot be had of steps of 10,000
    assert sizes[0] < sizes[-1]


def test_more_ranks_than_responses() -> None:
    (plan,) = plan_batch(header_of([5], [3, 0]), replace(RULES, data_ranks=3))
    assert sorted(plan.micro_batches) == [[[]], [[]], [[0]]]


def test_empty_batch_has_no_updates() -> None:
    none = np.zeros(0, np.int32)
    header = replace(header_of([1], [1]), groups=none, prompt_lengths=none, response_lengths=none)
    assert plan_batch(header, RULES) == []


def test_sequence_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"training\.micro_batch_tokens \(30\).* 32 tokens with padding"):
        plan_batch(header_of([10], [20, 5]), replace(RULES, micro_batch_tokens=30, sequence_multiple=4))


def build(
    rules: PackingRules = RULES, data_rank: int = 0, context_rank: int = 0
) -> tuple[BatchHeader, TokenBlock, Batch]:
    header, tokens = make_batch(VOCAB)
    plans = plan_batch(header, rules)
    share = select(tokens, share_of(plans, data_rank))
    return (
        header,
        tokens,
        build_batch(header, plans, share, rules, data_rank=data_rank, context_rank=context_rank, device=CPU),
    )


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
    parts = [build(replace(RULES, data_ranks=2), data_rank=rank)[2] for rank in range(2)]
    members = [r for part in parts for micro in part.micro_batches() for r in micro.responses.unique().tolist()]
    assert sorted(members) == sorted(r for micro in whole.micro_batches() for r in micro.responses.unique().tolist())
    for part in parts:
        assert [mini.num_tokens for mini in part.mini_batches()] == [int(header.response_lengths.sum())]
        assert [mini.num_responses for mini in part.mini_batches()] == [15]  # one of 16 is empty


def test_mini_batches_count_their_own_tokens() -> None:
    header, _, batch = build(replace(RULES, mini_batch=8))
    assert batch.num_updates == 2
    expected = [int(header.response_lengths[:8].sum()), int(header.response_lengths[8:].sum())]
    assert [mini.num_tokens for mini in batch.mini_batches()] == expected
    assert [mini.num_responses for mini in batch.mini_batches()] == [7, 8]


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("filtered", "loss"), [(True, 1.0), (False, None)])
def test_a_cut_off_response_is_filtered_out_of_the_loss(mode: Aggregation, filtered: bool, loss: float | None) -> None:
    """Two responses of 2 and 6 tokens with the losses 1 and 0; the engine cut the second one off."""
    header = replace(header_of([3], [2, 6]), truncated=np.array([False, True]))
    rules = replace(RULES, filter_truncated=filtered)
    plans = plan_batch(header, rules)
    share = share_of(plans, 0)
    assert share.tolist() == ([0] if filtered else [0, 1])  # what the rank fetches
    tokens = TokenBlock(
        responses=share,
        prompt_lengths=np.full(len(share), 3, np.int32),
        response_lengths=header.response_lengths[share],
        prompt_tokens=np.ones(3 * len(share), np.int32),
        response_tokens=np.ones(header.response_lengths[share].sum(), np.int32),
        rollout_log_probs=np.zeros(header.response_lengths[share].sum(), np.float32),
    )
    batch = build_batch(header, plans, tokens, rules, data_rank=0, context_rank=0, device=CPU)
    ((micro,), (mini,)) = batch.micro_batches(), batch.mini_batches()
    assert sorted(micro.responses.tolist()) == [0] * 2 + [1] * 6 * (not filtered)
    assert (mini.num_tokens, mini.num_responses) == ((2, 1) if filtered else (8, 2))
    batch.set_advantages(torch.tensor([1.0, -1.0]))  # rewards of the whole group stand behind both
    assert micro.advantages[micro.responses == 0].tolist() == [1.0, 1.0]
    value = aggregate(
        (micro.responses == 0).double(),
        torch.ones(len(micro.responses), dtype=torch.bool),
        micro.responses,
        mode,
        num_tokens=mini.num_tokens,
        num_responses=mini.num_responses,
        response_lengths=micro.response_lengths,
    )
    assert value.item() == (loss or {"token_mean": 0.25, "sequence_mean": 0.5}[mode])


def test_only_what_the_engine_cut_off_is_filtered() -> None:
    """Empty, longest and cut-off responses over two updates and two ranks; the counts are each update's own."""
    header = header_of([5, 5], [12, 12, 0, 4, 3, 12, 1, 2])
    header = replace(header, truncated=np.array([0, 1, 1, 0, 1, 0, 0, 1], bool))
    rules = replace(RULES, mini_batch=4, data_ranks=2, filter_truncated=True)
    plans = plan_batch(header, rules)
    assert sorted(np.concatenate([share_of(plans, rank) for rank in range(2)]).tolist()) == [0, 3, 5, 6]
    tokens = TokenBlock(
        responses=np.arange(8, dtype=np.int32),
        prompt_lengths=np.full(8, 5, np.int32),
        response_lengths=header.response_lengths,
        prompt_tokens=np.ones(40, np.int32),
        response_tokens=np.ones(46, np.int32),
        rollout_log_probs=np.zeros(46, np.float32),
    )
    for rank in range(2):
        batch = build_batch(header, plans, tokens, rules, data_rank=rank, context_rank=0, device=CPU)
        assert [(mini.num_tokens, mini.num_responses) for mini in batch.mini_batches()] == [(16, 2), (13, 2)]


def test_an_update_whose_responses_are_all_filtered_is_of_padding() -> None:
    header = replace(header_of([5], [3, 4]), truncated=np.ones(2, bool))
    rules = replace(RULES, data_ranks=2, filter_truncated=True)
    plans = plan_batch(header, rules)
    assert [plan.micro_batches for plan in plans] == [[[[]], [[]]]]
    none = TokenBlock(*(np.zeros(0, np.int32) for _ in range(5)), np.zeros(0, np.float32))
    batch = build_batch(header, plans, none, rules, data_rank=0, context_rank=0, device=CPU)
    ((micro,), (mini,)) = batch.micro_batches(), batch.mini_batches()
    assert (len(micro.responses), mini.num_tokens, mini.num_responses) == (0, 0, 0)


def test_tokens_of_old_weights_are_out_of_the_loss() -> None:
    """Of responses of 2, 6, 3 and 0 tokens, 2, 4 and 0 are too old; what is left keeps its places and counts."""
    columns = ([0, 1, 1, 1, 2], [3, 2, 3, 4, 4], [2, 1, 3, 2, 3])
    responses, versions, lengths = (np.array(column, np.int32) for column in columns)
    header = replace(
        header_of([3, 4], [2, 6, 3, 0]),
        run_responses=responses,
        run_versions=versions,
        run_lengths=lengths,
        oldest_in_loss=4,
    )
    assert header.lengths_out_of_loss.tolist() == [2, 4, 0, 0]
    plans = plan_batch(header, RULES)
    assert share_of(plans, 0).tolist() == [1, 2]
    tokens = TokenBlock(
        responses=np.array([1, 2], np.int32),
        prompt_lengths=np.array([3, 4], np.int32),
        response_lengths=np.array([6, 3], np.int32),
        prompt_tokens=np.arange(10, 17, dtype=np.int32),
        response_tokens=np.arange(20, 29, dtype=np.int32),
        rollout_log_probs=np.arange(9, dtype=np.float32),
    )
    batch = build_batch(header, plans, tokens, RULES, data_rank=0, context_rank=0, device=CPU)
    ((micro,), (mini,)) = batch.micro_batches(), batch.mini_batches()
    assert (mini.num_tokens, mini.num_responses) == (5, 2)
    order = torch.argsort(micro.responses, stable=True)
    assert micro.responses[order].tolist() == [1, 1, 2, 2, 2]
    assert micro.places[order].tolist() == [4, 5, 0, 1, 2]
    assert micro.response_lengths[order].tolist() == [2, 2, 3, 3, 3]
    assert micro.rollout_log_probs[order].tolist() == [4, 5, 6, 7, 8]
    assert micro.targets.tokens[order].tolist() == [24, 25, 26, 27, 28]
    assert batch.token_index(micro)[order].tolist() == [6, 7, 8, 9, 10]  # among all eleven of the batch
    assert set(range(20, 25)) < set(micro.input_ids[0].tolist())  # they are still read


@pytest.mark.parametrize("chosen", [False, True])
def test_the_filter_is_configured(chosen: bool) -> None:
    config = make_config("unused", algorithm={"overlong": {"filter": chosen}})
    layout = Layout(**{size.name: 1 for size in fields(Layout)})
    assert PackingRules.of(config, llama.architecture(LLAMA), layout).filter_truncated is chosen


@pytest.mark.parametrize(("total_multiple", "context", "length"), [(1, 1, 1), (12, 1, 12), (12, 2, 6)])
def test_rank_without_responses_gets_padding(total_multiple: int, context: int, length: int) -> None:
    header = header_of([5], [3])
    tokens = TokenBlock(*(np.zeros(0, dtype) for dtype in (np.int32,) * 5), np.zeros(0, np.float32))
    rules = replace(RULES, data_ranks=2, total_multiple=total_multiple, context=context, sequence_multiple=2 * context)
    plans = plan_batch(header, rules)
    empty = next(rank for rank in range(2) if not plans[0].micro_batches[rank][0])
    batch = build_batch(header, plans, tokens, rules, data_rank=empty, context_rank=0, device=CPU)
    (micro,) = batch.micro_batches()
    assert micro.input_ids.tolist() == [[0] * length]
    assert micro.input_ids.dtype == torch.int64
    assert micro.packed.cu_seqlens_q.tolist() == [0, total_multiple]
    assert len(micro.targets.index) == len(micro.targets.tokens) == len(micro.responses) == 0


def test_padding_is_nobodys_target() -> None:
    """Sequences end at multiples of 8, micro-batches at multiples of 20; every target is where it was."""
    _, tokens, batch = build(replace(RULES, sequence_multiple=8, total_multiple=20, micro_batch_tokens=100))
    rows = rows_of(tokens)
    for micro in batch.micro_batches():
        assert micro.total_length == micro.input_ids.numel()
        assert micro.total_length % 20 == 0
        members = list(dict.fromkeys(micro.responses.tolist()))
        for response, sequence in itertools.zip_longest(members, sequences(micro)):
            if response is None:
                assert set(sequence) <= {0}  # what the micro-batch was filled up with
                continue
            prompt, answer, _ = rows[response]
            inputs = [*prompt, *answer[:-1]]
            assert sequence == inputs + [0] * (-len(inputs) % 8)
        assert micro.targets.tokens.tolist() == np.concatenate([rows[r][1] for r in members]).tolist()


def test_micro_batches_of_an_interleaved_pipeline_are_of_one_length() -> None:
    _, _, batch = build(replace(RULES, same_length=True, count_multiple=2, micro_batch_tokens=120, mini_batch=8))
    assert len({micro.input_ids.numel() for micro in batch.micro_batches()}) == 1
    assert all(len(mini.micro_batches) % 2 == 0 for mini in batch.mini_batches())


def test_context_parallel_ranks_hold_each_token_once() -> None:
    """Together they have the inputs, targets and places that one rank has."""
    rules = replace(RULES, sequence_multiple=4, total_multiple=4)
    _, tokens, whole = build(rules)
    parts = [build(replace(rules, context=2), context_rank=rank)[2] for rank in range(2)]
    for micro, *halves in zip(whole.micro_batches(), *(part.micro_batches() for part in parts), strict=True):
        assert [half.input_ids.numel() * 2 for half in halves] == [micro.input_ids.numel()] * 2
        found = {
            (response, place): (target, half.input_ids[0, index].item(), rollout)
            for half in halves
            for response, place, target, index, rollout in zip(
                half.responses.tolist(),
                half.places.tolist(),
                half.targets.tokens.tolist(),
                half.targets.index.tolist(),
                half.rollout_log_probs.tolist(),
                strict=True,
            )
        }
        assert len(found) == len(micro.responses)
        for response in micro.responses.unique().tolist():
            prompt, answer, rollout = rows_of(tokens)[response]
            before = [prompt[-1], *answer[:-1]]
            expected = list(zip(answer.tolist(), before, rollout.tolist(), strict=True))
            assert [found[response, place] for place in range(len(answer))] == expected
        for half in halves:
            lengths = [len(rows_of(tokens)[r][1]) for r in half.responses.tolist()]
            assert half.response_lengths.tolist() == lengths


def test_advantages_of_tokens_reach_them_on_every_rank() -> None:
    """A value that names its response and place, in the header's order."""
    rules = replace(RULES, data_ranks=2, context=2, sequence_multiple=4, total_multiple=4, mini_batch=8)
    seen: list[float] = []
    for data_rank, context_rank in itertools.product(range(2), range(2)):
        header, _, batch = build(rules, data_rank, context_rank)
        batch.set_token_advantages(
            torch.cat([1000.0 * r + torch.arange(n) for r, n in enumerate(header.response_lengths.tolist())])
        )
        for micro in batch.micro_batches():
            assert micro.advantages.tolist() == (1000 * micro.responses + micro.places).tolist()
            seen += micro.advantages.tolist()
    assert len(set(seen)) == len(seen) == header.response_lengths.sum()


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
