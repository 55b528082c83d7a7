"""What an update is to learn from a batch: advantages of all its tokens, from rewards, reference and critic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dapo_megatron.algorithm.advantage import AdvantageOptions, gae, response_advantages, whitened
from dapo_megatron.algorithm.dpo import dpo
from dapo_megatron.algorithm.kl import kl_penalty
from dapo_megatron.algorithm.process_rewards import process_advantages, token_rewards
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.columns import gather_column, response_sums
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.trained import Metrics
from dapo_megatron.types import BatchHeader


def set_advantages(batch: Batch, layout: Layout, algorithm: AlgorithmConfig) -> Metrics:
    """Give every token of the batch its advantage, and its return where there is a critic; metrics of what they are.

    A collective over all ranks where a reference or a critic is read. Everything is computed on every rank for the
    whole batch, so that no layout changes a number.

    Args:
        batch: with its old log-probs, and those of the reference and the critic's values where there are any.
        layout: the policy's.
        algorithm: the objective.
    """
    if algorithm.loss == "dpo":
        return _set_preferences(batch, layout, algorithm)
    penalties = _penalties(batch, algorithm)
    if algorithm.advantage.estimator == "gae":
        return _set_estimates(batch, layout, algorithm, penalties)
    rewards = torch.from_numpy(batch.header.rewards)
    if penalties is not None:
        rewards = rewards - response_sums(batch, penalties, layout).float()
    batch.set_token_advantages(batch_advantages(batch.header, algorithm.advantage, rewards))
    return {}


def batch_advantages(header: BatchHeader, config: AdvantageOptions, rewards: Tensor) -> Tensor:
    """Advantage of each response token of a batch, floating [T] in the header's order; equal on every rank.

    `rewards` of whole responses are floating [R]: those of the header, or what a penalty leaves of them. Raises
    ValueError for `gae`, which needs a critic's values.
    """
    groups, lengths = torch.from_numpy(header.groups), torch.from_numpy(header.response_lengths)
    if not len(header.step_rewards):
        return response_advantages(rewards, groups, lengths, config).repeat_interleave(lengths)
    return process_advantages(*step_tensors(header), rewards, groups, lengths, config)


def step_tensors(header: BatchHeader) -> tuple[Tensor, Tensor, Tensor]:
    """The process rewards of a batch: rewards fp32, responses and places int32, each [S]."""
    rewards, responses, places = header.step_rewards, header.step_responses, header.step_places
    return torch.from_numpy(rewards), torch.from_numpy(responses), torch.from_numpy(places)


def _penalties(batch: Batch, algorithm: AlgorithmConfig) -> list[Tensor] | None:
    """What the divergence from the reference takes from the reward at each token, fp32 [n] per micro-batch.

    It is estimated under the policy at the start of the step, from which the answers were sampled.
    """
    kl = algorithm.kl
    if not kl.coefficient or kl.place == "loss":
        return None
    return [
        kl.coefficient * kl_penalty(micro.old_log_probs, micro.reference_log_probs, kl.estimator)
        if len(micro.reference_log_probs)  # the last pipeline stage alone has them
        else micro.reference_log_probs
        for micro in batch.micro_batches()
    ]


def _set_estimates(
    batch: Batch, layout: Layout, algorithm: AlgorithmConfig, penalties: Sequence[Tensor] | None
) -> Metrics:
    """Generalised advantage estimates, and the returns (estimate + value) that the critic is to predict.

    Tokens out of the loss have no value: they stand before those in it, whose estimates look ahead.
    """
    config, header = algorithm.advantage, batch.header
    known = [micro.old_values for micro in batch.micro_batches()]
    values = gather_column(batch, known, layout).cpu()
    in_loss = gather_column(batch, [torch.ones_like(column) for column in known], layout).cpu()
    lengths = torch.from_numpy(header.response_lengths)
    per_token = token_rewards(*step_tensors(header), lengths)
    if penalties is not None:
        per_token = per_token - gather_column(batch, penalties, layout).cpu()
    gamma, lam = (1.0 if option is None else option for option in (config.gamma, config.lam))
    advantages = gae(torch.from_numpy(header.rewards), values, lengths, gamma, lam, token_rewards=per_token)
    returns = advantages + values
    if config.whiten:
        advantages = whitened(advantages, in_loss)
    batch.set_token_advantages(advantages)
    batch.set_returns(returns)
    tokens = in_loss.sum().clamp(min=1)
    return {"value": float(values.sum() / tokens), "return": float((returns * in_loss).sum() / tokens)}


def _set_preferences(batch: Batch, layout: Layout, algorithm: AlgorithmConfig) -> Metrics:
    """The derivative of the preference loss at the policy of the step's one update, as advantages."""
    micro_batches, correct = batch.micro_batches(), torch.from_numpy(batch.header.correct)
    order = torch.from_numpy(batch.header.groups).argsort(stable=True)  # the two of a pair, one after the other
    result = dpo(
        response_sums(batch, [micro.old_log_probs for micro in micro_batches], layout),
        response_sums(batch, [micro.reference_log_probs for micro in micro_batches], layout),
        order[correct[order]],
        order[~correct[order]],
        beta=algorithm.dpo.beta,
        label_smoothing=algorithm.dpo.label_smoothing,
    )
    batch.set_advantages(result.advantages.float())
    return {
        "preference_loss": float(result.losses.mean()),
        "preference_accuracy": float((result.margins.sign().mean() + 1) / 2),  # a margin of 0 is half right
        "preference_margin": float(result.margins.mean()),
    }
