"""What `set_advantages` gives the tokens of a batch, for every objective."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo_megatron.algorithm.advantage import gae, response_advantages, whitened
from dapo_megatron.algorithm.dpo import dpo
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.models.families import llama
from dapo_megatron.trainer.advantages import batch_advantages, set_advantages
from dapo_megatron.trainer.batching import Batch, PackingRules, load_batch
from dapo_megatron.trainer.columns import gather_column
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.types import BatchHeader, TokenBlock
from tests.batches import make_batch, make_config
from tests.unit.config_helpers import LLAMA

ESTIMATORS = ["group_norm", "group_mean", "leave_one_out", "min_max", "reinforce_pp"]


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def load(header: BatchHeader, tokens: TokenBlock, layout: Layout, **training: Any) -> Batch:
    rules = PackingRules.of(make_config("unused", training=training), llama.architecture(LLAMA), layout)
    return load_batch(header, rules, layout, lambda _: tokens)


def random_batch(layout: Layout, *, samples: int = 4, **changes: Any) -> Batch:
    """Four groups in several micro-batches; `changes` are fields of the header."""
    header, tokens = make_batch(100, samples=samples)
    return load(replace(header, **changes), tokens, layout, mini_batch=8, micro_batch_tokens=48)


def small_batch(layout: Layout, rewards: list[float], groups: Sequence[int] = (0, 0, 1, 1), **changes: Any) -> Batch:
    """Two groups of two responses of 2, 1, 0 and 3 tokens."""
    lengths, members = np.array([2, 1, 0, 3], np.int32), np.array(groups, np.int32)
    prompts = np.array([4, 5], np.int32)
    header = BatchHeader(
        step=1,
        groups=members,
        draws=np.arange(2, dtype=np.int32),
        prompt_ids=np.arange(2, dtype=np.int32),
        prompt_lengths=prompts,
        response_lengths=lengths,
        rewards=np.array(rewards, np.float32),
        correct=np.array(rewards) > 0,
        truncated=np.zeros(4, bool),
    )
    tokens = TokenBlock(
        responses=np.arange(4, dtype=np.int32),
        prompt_lengths=prompts[members],
        response_lengths=lengths,
        prompt_tokens=np.arange(18, dtype=np.int32),
        response_tokens=np.arange(6, dtype=np.int32),
        rollout_log_probs=np.zeros(6, np.float32),
    )
    return load(replace(header, **changes), tokens, layout, mini_batch=4, micro_batch_tokens=36)


def random_column(batch: Batch, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(batch.header.response_lengths.sum()), generator=generator)


def advantages_of(batch: Batch, layout: Layout) -> Tensor:
    """What the tokens have, fp32 [T] in the header's order."""
    return gather_column(batch, [micro.advantages for micro in batch.micro_batches()], layout)


def returns_of(batch: Batch, layout: Layout) -> Tensor:
    return gather_column(batch, [micro.returns for micro in batch.micro_batches()], layout)


def score(batch: Batch, old: Tensor, reference: Tensor) -> None:
    """Give the batch log-probs, fp32 [T] in the header's order."""
    batch.set_old_log_probs(batch.pick(old))
    batch.set_reference_log_probs(batch.pick(reference))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_outcome_estimators_give_every_token_its_responses_advantage(estimator: str, layout: Layout) -> None:
    batch, config = random_batch(layout), algorithm(advantage={"estimator": estimator})
    assert set_advantages(batch, layout, config) == {}
    header = batch.header
    lengths = torch.from_numpy(header.response_lengths)
    expected = response_advantages(
        torch.from_numpy(header.rewards), torch.from_numpy(header.groups), lengths, config.advantage
    )
    assert expected.any()
    assert torch.equal(advantages_of(batch, layout), expected.repeat_interleave(lengths))
    assert not any(len(micro.returns) for micro in batch.micro_batches())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_kl_term_in_the_loss_leaves_advantages_alone(estimator: str, layout: Layout) -> None:
    batch, config = random_batch(layout), {"advantage": {"estimator": estimator}}
    set_advantages(batch, layout, algorithm(**config))
    expected = advantages_of(batch, layout)
    score(batch, random_column(batch, 1), random_column(batch, 2))
    set_advantages(batch, layout, algorithm(**config, kl={"coefficient": 0.5}))
    assert torch.equal(advantages_of(batch, layout), expected)


OLD, REFERENCE = torch.tensor([-1.0, -2, -3, -1, -1, -1]), torch.tensor([-1.5, -2, -2, -1, -2, -1.25])
"""d = old - reference: 0.5, 0 | -1 | | 0, 1, 0.25."""


def test_kl_in_the_reward_of_a_response(layout: Layout) -> None:
    """By hand: rewards 1, -1, 1, -1 less 0.1 x the responses' sums of d, 0.5, -1, 0 and 1.25."""
    batch = small_batch(layout, [1, -1, 1, -1])
    score(batch, OLD, REFERENCE)
    kl = {"coefficient": 0.1, "estimator": "k1", "in": "reward"}
    set_advantages(batch, layout, algorithm(advantage={"estimator": "group_mean"}, kl=kl))
    first, last = (0.95 + 0.9) / 2, (1 + 1.125) / 2  # half the distance between the two of a group
    expected = torch.tensor([first, first, -first, -last, -last, -last])
    torch.testing.assert_close(advantages_of(batch, layout), expected, rtol=0, atol=1e-6)


def test_kl_in_the_reward_moves_a_group_of_equal_rewards(layout: Layout) -> None:
    """It is no reward of the header: group_norm sees what the penalty left."""
    batch = small_batch(layout, [1, 1, 1, 1])
    score(batch, OLD, REFERENCE)
    kl = {"coefficient": 1.0, "estimator": "k2", "in": "reward"}
    set_advantages(batch, layout, algorithm(kl=kl))
    one = 0.5**0.5  # two rewards stand at +-1 / sqrt(2) sample deviations
    expected = torch.tensor([one, one, -one, -one, -one, -one])
    torch.testing.assert_close(advantages_of(batch, layout), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(batch.header.rewards, 1)


def test_kl_in_the_reward_of_a_token(layout: Layout) -> None:
    """By hand with gamma = lambda = 1 and values of 0: what comes from the token on, less 0.1 x d on the way."""
    batch = small_batch(layout, [1, -1, 1, -1])
    score(batch, OLD, REFERENCE)
    batch.set_old_values(batch.pick(torch.zeros(6)))
    kl = {"coefficient": 0.1, "estimator": "k1", "in": "reward"}
    metrics = set_advantages(batch, layout, algorithm(advantage={"estimator": "gae"}, kl=kl))
    expected = torch.tensor([0.95, 1.0, -0.9, -1.125, -1.125, -1.025])
    torch.testing.assert_close(advantages_of(batch, layout), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(returns_of(batch, layout), expected, rtol=0, atol=1e-6)
    assert metrics == pytest.approx({"value": 0.0, "return": float(expected.mean())})


@pytest.mark.parametrize("options", [{}, {"gamma": 0.9, "lam": 0.8}, {"gamma": 0.9, "lam": 0.8, "whiten": True}])
def test_estimates_of_a_critic(options: dict[str, Any], layout: Layout) -> None:
    """Those of the flat arrays; the critic's returns are never whitened."""
    batch = random_batch(layout)
    values = random_column(batch, 3)
    batch.set_old_values(batch.pick(values))
    metrics = set_advantages(batch, layout, algorithm(advantage={"estimator": "gae", **options}))
    header = batch.header
    expected = gae(
        torch.from_numpy(header.rewards),
        values,
        torch.from_numpy(header.response_lengths),
        options.get("gamma", 1.0),
        options.get("lam", 1.0),
    )
    returns = expected + values
    if options.get("whiten"):
        expected = whitened(expected, torch.ones_like(expected))
        assert float(expected.mean()) == pytest.approx(0, abs=1e-6)
    assert torch.equal(advantages_of(batch, layout), expected)
    assert torch.equal(returns_of(batch, layout), returns)
    assert metrics == {"value": float(values.mean()), "return": float(returns.mean())}


def test_estimates_are_of_tokens_in_the_loss(layout: Layout) -> None:
    """Of the responses of 2, 1, 0 and 3 tokens, the first's first and the last's first one are of old weights."""
    columns = ([0, 0, 1, 3, 3], [0, 1, 1, 0, 1], [1, 1, 1, 1, 2])
    responses, versions, lengths = (np.array(column, np.int32) for column in columns)
    runs = {"run_responses": responses, "run_versions": versions, "run_lengths": lengths, "oldest_in_loss": 1}
    batch = small_batch(layout, [1, -1, 1, -1], **runs)
    values, kept = torch.tensor([9.0, 0.5, 0.25, 9.0, -1.0, 2.0]), torch.tensor([1, 2, 4, 5])
    batch.set_old_values(batch.pick(values))
    metrics = set_advantages(batch, layout, algorithm(advantage={"estimator": "gae", "lam": 0.5, "whiten": True}))
    last = -1 - 2.0
    expected = torch.tensor([1 - 0.5, -1 - 0.25, 2.0 + 1.0 + 0.5 * last, last])
    found = advantages_of(batch, layout)[kept]
    torch.testing.assert_close(found, whitened(expected, torch.ones(4)), rtol=0, atol=1e-6)
    torch.testing.assert_close(returns_of(batch, layout)[kept], expected + values[kept], rtol=0, atol=1e-6)
    assert metrics["value"] == pytest.approx(float(values[kept].mean()))
    assert metrics["return"] == pytest.approx(float((expected + values[kept]).mean()))


STEPS: dict[str, Any] = {
    "step_responses": np.array([0, 0, 3], np.int32),
    "step_places": np.array([0, 1, 1], np.int32),
    "step_rewards": np.array([0.5, -0.25, 2.0], np.float32),
}


def test_process_rewards_reach_the_critics_tokens(layout: Layout) -> None:
    """By hand with gamma = lambda = 1 and values of 0: rewards of steps that end at the token or later."""
    batch = small_batch(layout, [1, -1, 1, -1], **STEPS)
    batch.set_old_values(batch.pick(torch.zeros(6)))
    set_advantages(batch, layout, algorithm(advantage={"estimator": "gae"}))
    expected = torch.tensor([1.25, 0.75, -1.0, 1.0, 1.0, -1.0])
    torch.testing.assert_close(advantages_of(batch, layout), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_process_rewards_reach_their_tokens(estimator: str, layout: Layout) -> None:
    batch, config = small_batch(layout, [1, -1, 1, -1], **STEPS), algorithm(advantage={"estimator": estimator})
    set_advantages(batch, layout, config)
    found = advantages_of(batch, layout)
    rewards = torch.from_numpy(batch.header.rewards)
    assert torch.equal(found, batch_advantages(batch.header, config.advantage, rewards))
    assert found[0] != found[1]  # of one response


def test_process_rewards_and_a_penalty_add_up(layout: Layout) -> None:
    """The penalty is taken from the reward of the whole response, the steps keep theirs."""
    batch = small_batch(layout, [1, -1, 1, -1], **STEPS)
    score(batch, OLD, REFERENCE)
    kl = {"coefficient": 0.1, "estimator": "k1", "in": "reward"}
    config = algorithm(advantage={"estimator": "group_mean"}, kl=kl)
    set_advantages(batch, layout, config)
    left = torch.tensor([0.95, -0.9, 1.0, -1.125])
    expected = batch_advantages(batch.header, config.advantage, left)
    torch.testing.assert_close(advantages_of(batch, layout), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("better_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "label_smoothing": 0.1}])
def test_preferences_find_the_better_of_each_pair(better_first: bool, options: dict[str, Any], layout: Layout) -> None:
    """Wherever the members of a pair stand: side by side in either order."""
    correct = np.tile([better_first, not better_first], 4)
    batch = random_batch(layout, samples=2, correct=correct)
    old, reference = random_column(batch, 4), random_column(batch, 5)
    score(batch, old, reference)
    metrics = set_advantages(batch, layout, algorithm(loss="dpo", aggregation="sequence_sum", dpo=options))
    lengths = batch.header.response_lengths.tolist()
    sums, reference_sums = (
        torch.stack([part.double().sum() for part in column.split(lengths)]) for column in (old, reference)
    )
    first, second = torch.arange(0, 8, 2), torch.arange(1, 8, 2)
    chosen, rejected = (first, second) if better_first else (second, first)
    expected = dpo(sums, reference_sums, chosen, rejected, **{"beta": 0.1} | options)
    per_token = expected.advantages.float().repeat_interleave(torch.tensor(lengths))
    torch.testing.assert_close(advantages_of(batch, layout), per_token, rtol=1e-6, atol=0)
    assert (per_token > 0).sum() == batch.header.response_lengths[correct].sum()
    assert metrics == pytest.approx(
        {
            "preference_loss": float(expected.losses.mean()),
            "preference_accuracy": float((expected.margins > 0).double().mean()),
            "preference_margin": float(expected.margins.mean()),
        }
    )


def test_members_of_a_pair_need_not_stand_side_by_side(layout: Layout) -> None:
    """By hand: the sums of d are 0.5, -1, 0 and 1.25, the pairs (0, 3) and (1, 2)."""
    batch = small_batch(layout, [1, 1, -1, -1], groups=[1, 0, 0, 1])
    score(batch, OLD, REFERENCE)
    metrics = set_advantages(batch, layout, algorithm(loss="dpo", aggregation="sequence_sum", dpo={"beta": 2}))
    first, second = (4 / (1 + math.exp(2 * gap)) for gap in (0.5 - 1.25, -1 - 0))
    expected = torch.tensor([first, first, second, -first, -first, -first])
    torch.testing.assert_close(advantages_of(batch, layout), expected, rtol=1e-6, atol=0)
    assert metrics == pytest.approx(
        {
            "preference_loss": (math.log(1 + math.exp(1.5)) + math.log(1 + math.exp(2))) / 2,
            "preference_accuracy": 0.0,
            "preference_margin": (-1.5 - 2) / 2,
        }
    )
