"""Where the trainer takes pi_old from, and how the difference between engine and trainer weighs the losses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.correction import RolloutCorrection, rollout_correction
from dapo_megatron.algorithm.policy_loss import policy_loss
from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.batching import load_batch as load
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.verify_layout import compute_in_fp64, nearby_log_probs
from dapo_megatron.types import BatchHeader, TokenBlock
from tests.batches import load_batch, make_batch, make_config, partly_old

Make = Callable[..., Policy]

# The made-up engine gives tokens about 20 times the probability that the untrained policy does.
CORRECTIONS: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "tis", "floor": 0.05},
    {"mode": "mis", "low": 0.05},
    {"mode": "mis", "low": 1e-7, "level": "sequence"},
    {"mode": "mis", "low": 0.05, "level": "sequence_mean"},
]
ids = [f"{c['mode']}-{c.get('level', 'token')}" for c in CORRECTIONS]


@pytest.fixture
def make_policy(layout: Layout, checkpoint: Callable[..., Path]) -> Make:
    """A tiny policy in fp64; arguments are fields of the algorithm section."""

    def make(micro_batch_tokens: int = 96, **algorithm: Any) -> Policy:
        config = make_config(
            checkpoint(), algorithm=algorithm, training={"micro_batch_tokens": micro_batch_tokens, "mini_batch": 16}
        )
        policy = Policy(config, layout)
        compute_in_fp64(policy)
        return policy

    return make


def prepared(policy: Policy) -> tuple[Batch, list[Tensor]]:
    """A batch of an older policy, and the log-probs of this one."""
    batch = load_batch(policy)
    log_probs = policy.log_probs(batch)
    batch.set_old_log_probs(nearby_log_probs(batch, log_probs))
    return batch, log_probs


def expected(policy: Policy, batch: Batch, log_probs: list[Tensor]) -> tuple[float, RolloutCorrection]:
    """The loss of the whole batch as one, and the weights of all its tokens."""
    micros, algorithm = batch.micro_batches(), policy.config.algorithm
    own, responses = torch.cat(log_probs), torch.cat([micro.responses for micro in micros])
    old, rollout = (torch.cat([getattr(m, name) for m in micros]) for name in ("old_log_probs", "rollout_log_probs"))
    advantages, mask = torch.cat([micro.advantages for micro in micros]), torch.ones_like(own, dtype=torch.bool)
    correction = rollout_correction(old, rollout, mask, responses, algorithm.rollout_correction)
    losses = policy_loss(own, old, advantages, mask, responses, algorithm).losses
    return float(aggregate(losses * correction.weights, mask, responses)), correction


@pytest.mark.parametrize("correction", CORRECTIONS, ids=ids)
def test_losses_are_weighted_and_the_weights_measured(make_policy: Make, correction: dict[str, Any]) -> None:
    """However the batch is cut into micro-batches."""
    policy = make_policy(rollout_correction=correction)
    batch, log_probs = prepared(policy)
    loss, found = expected(policy, batch, log_probs)
    (mini_batch,) = batch.mini_batches()
    metrics = policy.gradients(mini_batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-9)
    assert metrics["rollout_weight"] == pytest.approx(float(found.ratio.mean()), rel=1e-9)
    assert metrics["rollout_truncated"] == pytest.approx(float(found.truncated.double().mean()))
    assert metrics["rollout_masked"] == pytest.approx(float(found.masked.double().mean()))
    if correction["mode"] == "mis":
        assert 0.05 < metrics["rollout_masked"] < 0.95
    if correction["mode"] == "tis":
        assert 0.05 < metrics["rollout_truncated"] < 0.95


@pytest.mark.parametrize("correction", CORRECTIONS[1:], ids=ids[1:])
def test_gradients_do_not_depend_on_the_cut(make_policy: Make, correction: dict[str, Any]) -> None:
    gradients = []
    for tokens in (48, 256):
        policy = make_policy(tokens, rollout_correction=correction)
        batch, _ = prepared(policy)
        (mini_batch,) = batch.mini_batches()
        policy.gradients(mini_batch)
        flat = torch.cat([parameter.main_grad.flatten().clone() for parameter in policy.chunks[0].parameters()])
        gradients.append((flat, len(mini_batch.micro_batches)))
    (fine, many), (coarse, few) = gradients
    assert many > few
    assert float(fine.norm()) > 0
    assert float((fine - coarse).norm() / coarse.norm()) < 1e-6


def test_the_weights_have_no_gradient_of_their_own(make_policy: Make) -> None:
    """Truncated everywhere to the same weight, the gradient is that weight times the uncorrected one."""
    gradients = []
    for correction in ({"mode": "none"}, {"mode": "tis", "cap": 1.0, "floor": 1.0}):
        policy = make_policy(rollout_correction=correction)
        (mini_batch,) = prepared(policy)[0].mini_batches()
        policy.gradients(mini_batch)
        gradients.append([parameter.main_grad.clone() for parameter in policy.chunks[0].parameters()])
    assert all(torch.equal(plain, weighted) for plain, weighted in zip(*gradients, strict=True))
    assert any(plain.any() for plain in gradients[0])


def test_old_log_probs_of_the_engine_need_no_forward_pass(make_policy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(old_log_probs="rollout")
    batch = load_batch(policy)
    monkeypatch.setattr("dapo_megatron.trainer.policy.outputs_of", None)
    batch.set_old_log_probs(policy.old_log_probs(batch))
    monkeypatch.undo()
    assert all(micro.old_log_probs is micro.rollout_log_probs for micro in batch.micro_batches())
    (mini_batch,) = batch.mini_batches()
    metrics = policy.gradients(mini_batch)
    assert metrics["log_ratio_abs"] > 1  # from the first update on: the engine is far from the policy
    assert (metrics["rollout_diff"], metrics["rollout_weight"], metrics["rollout_masked"]) == (0.0, 1.0, 0.0)


def test_old_log_probs_are_recomputed_by_default(make_policy: Make) -> None:
    policy = make_policy()
    batch = load_batch(policy)
    batch.set_old_log_probs(policy.old_log_probs(batch))
    (mini_batch,) = batch.mini_batches()
    assert policy.gradients(mini_batch)["log_ratio_abs"] == 0.0  # law 6


OBJECTIVES: list[dict[str, Any]] = [
    *({"aggregation": mode} for mode in ("token_mean", "sequence_mean", "sequence_sum_norm", "sequence_sum")),
    {"loss": "gspo", "aggregation": "sequence_mean", "clip": {"low": 0.05, "high": 0.07}},
    {"rollout_correction": {"mode": "tis", "floor": 0.05}, "entropy_coefficient": 0.1},
    {"aggregation": "sequence_mean", "rollout_correction": {"mode": "mis", "low": 0.05, "level": "sequence_mean"}},
    {"rollout_correction": {"mode": "mis", "low": 1e-7, "level": "sequence"}},
]


def partly_stale(policy: Policy) -> tuple[BatchHeader, TokenBlock]:
    """A batch whose responses begin with tokens of version 0, then have some of version 1: all, none or a part each."""
    rollout = policy.config.rollout
    header, tokens = make_batch(policy.arch.vocab_size, rollout.prompts_per_step, rollout.samples_per_prompt)
    old = np.random.default_rng(1).integers(0, header.response_lengths + 1)
    old[:2] = header.response_lengths[0], 0
    return partly_old(header, old), tokens


def as_prompts(header: BatchHeader, tokens: TokenBlock) -> tuple[BatchHeader, TokenBlock]:
    """The same sequences, the tokens that are out of the loss at the end of prompts. Each response has a prompt."""
    old, ends = header.lengths_out_of_loss, np.cumsum(tokens.response_lengths)
    starts = ends - tokens.response_lengths
    answers = [np.arange(start + out, end) for start, out, end in zip(starts, old, ends, strict=True)]
    prompts = np.split(tokens.prompt_tokens, np.cumsum(tokens.prompt_lengths)[:-1])
    longer = [
        np.concatenate([prompt, tokens.response_tokens[start : start + out]])
        for prompt, start, out in zip(prompts, starts, old, strict=True)
    ]
    kept, prompt_lengths = np.concatenate(answers), tokens.prompt_lengths + old
    nothing = np.zeros(0, np.int32)
    moved = replace(
        header,
        groups=np.arange(len(old), dtype=np.int32),
        prompt_lengths=prompt_lengths,
        response_lengths=header.response_lengths - old,
        run_responses=nothing,
        run_versions=nothing,
        run_lengths=nothing,
    )
    return moved, replace(
        tokens,
        prompt_lengths=prompt_lengths,
        response_lengths=header.response_lengths - old,
        prompt_tokens=np.concatenate(longer),
        response_tokens=tokens.response_tokens[kept],
        rollout_log_probs=tokens.rollout_log_probs[kept],
    )


def gradients_of(
    policy: Policy, header: BatchHeader, tokens: TokenBlock, per_response: Tensor
) -> tuple[dict[str, float], list[Tensor]]:
    batch = load(header, policy.packing, policy.layout, lambda _: tokens)
    batch.set_old_log_probs(nearby_log_probs(batch, policy.log_probs(batch)))
    batch.set_advantages(per_response)
    (mini_batch,) = batch.mini_batches()
    metrics = policy.gradients(mini_batch)
    return metrics, [parameter.main_grad.clone() for parameter in policy.chunks[0].parameters()]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: "-".join(map(str, o.values()))[:40])
def test_tokens_of_old_weights_are_as_if_they_stood_in_the_prompt(make_policy: Make, objective: dict[str, Any]) -> None:
    """In neither sum nor count: loss, metrics and gradients are those of a batch in which they never counted."""
    policy = make_policy(**objective)
    header, tokens = partly_stale(policy)
    advantages = torch.linspace(-1.5, 2, header.num_responses)
    masked = replace(header, oldest_in_loss=1)
    found, gradients = gradients_of(policy, masked, tokens, advantages)
    expected, references = gradients_of(policy, *as_prompts(masked, tokens), advantages)
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert all(torch.equal(gradient, reference) for gradient, reference in zip(gradients, references, strict=True))
    assert any(gradient.any() for gradient in gradients)
    unmasked, _ = gradients_of(policy, header, tokens, advantages)
    assert abs(unmasked["loss"] - found["loss"]) > 1e-3


def test_without_a_token_young_enough_nothing_is_updated(make_policy: Make) -> None:
    policy = make_policy()
    header, tokens = partly_stale(policy)
    batch = load(replace(header, oldest_in_loss=2), policy.packing, policy.layout, lambda _: tokens)
    (mini_batch,) = batch.mini_batches()
    assert (mini_batch.num_tokens, mini_batch.num_responses) == (0, 0)
    batch.set_old_log_probs(policy.log_probs(batch))
    batch.set_advantages(torch.ones(header.num_responses))
    assert policy.update(mini_batch)["skipped_updates"] == 1.0
