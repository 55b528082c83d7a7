"""Columns: values of tokens leave the micro-batches for the header's order, and come back."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo_megatron.models.families import llama
from dapo_megatron.trainer.batching import Batch, PackingRules, load_batch
from dapo_megatron.trainer.columns import gather_column, response_sums
from dapo_megatron.trainer.parallel import Layout
from tests.batches import make_batch, make_config
from tests.unit.config_helpers import LLAMA

VOCAB = 100

MakeBatch = Callable[..., Batch]


@pytest.fixture
def batch_of(layout: Layout) -> MakeBatch:
    """Makes batches of two updates and several micro-batches; `truncated` lists responses that are cut off."""

    config = make_config(
        "unused", training={"mini_batch": 8, "micro_batch_tokens": 48}, algorithm={"overlong": {"filter": True}}
    )
    rules = PackingRules.of(config, llama.architecture(LLAMA), layout)

    def make(truncated: list[int] | None = None, seed: int = 0) -> Batch:
        header, tokens = make_batch(VOCAB, seed=seed)
        cut = np.isin(np.arange(header.num_responses), truncated or [])
        return load_batch(replace(header, truncated=cut), rules, layout, lambda _: tokens)

    return make


def random_column(batch: Batch, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(batch.header.response_lengths.sum()), generator=generator)


def of_filtered(batch: Batch) -> Tensor:
    """Whether a token is one of a filtered response, bool [T]."""
    return torch.from_numpy(np.repeat(batch.header.truncated, batch.header.response_lengths))


@pytest.mark.parametrize("truncated", [[], [0, 6, 7, 15], list(range(16))])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_gathered_is_what_was_picked(
    batch_of: MakeBatch, layout: Layout, truncated: list[int], seed: int
) -> None:
    """And tokens of filtered responses, which are in no micro-batch, are 0."""
    batch = batch_of(truncated, seed)
    assert batch.num_updates == 2
    assert len(batch.micro_batches()) > 4 or batch.header.truncated.all()
    column = random_column(batch, seed)
    gathered = gather_column(batch, batch.pick(column), layout)
    assert gathered.dtype == torch.float32
    assert torch.equal(gathered, torch.where(of_filtered(batch), 0.0, column))


def test_tokens_keep_their_order_of_the_header(batch_of: MakeBatch, layout: Layout) -> None:
    """The engine's log-probs, which every micro-batch was packed with, come out as they went in."""
    batch = batch_of()
    everything = np.arange(batch.header.num_responses, dtype=np.int32)
    column = gather_column(batch, batch.rollout_log_probs(), layout)
    assert torch.equal(column, torch.from_numpy(batch.fetch(everything).rollout_log_probs))


def test_a_stage_without_outputs_adds_nothing(batch_of: MakeBatch, layout: Layout) -> None:
    batch = batch_of()
    nothing = [torch.empty(0)] * len(batch.micro_batches())
    assert not gather_column(batch, nothing, layout).any()
    assert not response_sums(batch, nothing, layout).any()


def test_tensor_parallel_ranks_add_once(batch_of: MakeBatch, layout: Layout) -> None:
    batch = batch_of()
    second = replace(layout, tensor=2, tensor_rank=1)
    assert not gather_column(batch, batch.rollout_log_probs(), second).any()
    assert not response_sums(batch, batch.rollout_log_probs(), second).any()


def test_a_column_has_one_part_for_each_micro_batch(batch_of: MakeBatch, layout: Layout) -> None:
    batch = batch_of()
    with pytest.raises(ValueError, match="zip"):
        gather_column(batch, batch.rollout_log_probs()[:-1], layout)


@pytest.mark.parametrize("truncated", [[], [2, 9]])
def test_response_sums(batch_of: MakeBatch, layout: Layout, truncated: list[int]) -> None:
    """Equal to a loop over responses, in fp64; 0 for the empty and the filtered ones."""
    batch = batch_of(truncated)
    column = random_column(batch)
    sums = response_sums(batch, batch.pick(column), layout)
    assert sums.dtype == torch.float64
    lengths = batch.header.response_lengths.tolist()
    for response, values in enumerate(column.split(lengths)):
        expected = 0.0 if response in truncated else sum(values.tolist())
        assert sums[response].item() == pytest.approx(expected, abs=1e-12)
    assert batch.header.response_lengths[3] == 0
    assert sums[3] == 0


def test_values_of_lower_precision_are_gathered_in_fp32(batch_of: MakeBatch, layout: Layout) -> None:
    batch = batch_of()
    column = random_column(batch).bfloat16()
    assert torch.equal(gather_column(batch, batch.pick(column), layout), column.float())
