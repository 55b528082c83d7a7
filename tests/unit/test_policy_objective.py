"""Parts of the objective that the policy adds: the entropy bonus, and the clip range of the step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algorithm.aggregation import Aggregation, aggregate
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.config.run import Config
from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.trained import Metrics, outputs_of
from dapo_megatron.trainer.verify_layout import compute_in_fp64, nearby_log_probs
from tests.batches import RESPONSE_TOKENS, load_batch, make_config


@pytest.fixture
def config(checkpoint: Callable[..., Path], tmp_path: Path) -> Config:
    return make_config(checkpoint(), run={"dir": str(tmp_path), "save_every": 1})


def off_policy_batch(policy: Policy) -> Batch:
    """Random responses of an older policy, so that clipping acts."""
    batch = load_batch(policy)
    batch.set_old_log_probs(nearby_log_probs(batch, policy.log_probs(batch)))
    return batch


def gradients(policy: Policy, batch: Batch, **algorithm: Any) -> Metrics:
    """Metrics of one mini-batch under these fields of the algorithm section; the main gradients are there."""
    policy.config.algorithm = AlgorithmConfig.model_validate(algorithm)
    (mini_batch,) = batch.mini_batches()
    return policy.gradients(mini_batch)


def main_gradient(policy: Policy) -> Tensor:
    """All of it as one vector, fp64."""
    return torch.cat([p.main_grad.flatten().double() for p in policy.chunks[0].parameters()])


def mean_entropy(policy: Policy, batch: Batch, aggregation: Aggregation) -> float:
    """The policy's entropy, aggregated over the batch at once."""
    micro_batches = batch.micro_batches()
    entropy = torch.cat(outputs_of(policy.ddp, micro_batches, lambda outputs: outputs[1]))
    responses = torch.cat([micro.responses for micro in micro_batches])
    mask = torch.ones_like(responses, dtype=torch.bool)
    return float(aggregate(entropy, mask, responses, aggregation, max_tokens=RESPONSE_TOKENS))


@torch.no_grad()
def move(policy: Policy, direction: Tensor, distance: float) -> None:
    """Add `distance` x `direction` to the weights."""
    parameters = list(policy.chunks[0].parameters())
    for parameter, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
        parameter.add_(distance * part.view(parameter.shape))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_norm"])
def test_entropy_bonus_lowers_the_loss_and_its_gradient_raises_the_entropy(
    config: Config, layout: Layout, aggregation: Aggregation
) -> None:
    policy = Policy(config, layout)
    compute_in_fp64(policy)
    batch, coefficient = off_policy_batch(policy), 0.5
    without = gradients(policy, batch, aggregation=aggregation)
    plain = main_gradient(policy)
    bonus = gradients(policy, batch, aggregation=aggregation, entropy_coefficient=coefficient)
    ascent = (plain - main_gradient(policy)) / coefficient

    entropy = mean_entropy(policy, batch, aggregation)
    assert entropy > 0.1
    assert bonus["loss"] == pytest.approx(without["loss"] - coefficient * entropy, rel=1e-9)
    assert bonus["entropy"] == without["entropy"]

    step, around = 1e-3 / float(ascent.norm()), []
    for distance in (step, -2 * step):
        move(policy, ascent, distance)
        around.append(mean_entropy(policy, batch, aggregation))
    assert (around[0] - around[1]) / (2 * step) == pytest.approx(float(ascent.square().sum()), rel=1e-3)


def test_cispo_starts_with_the_gradient_of_ppo_clip(config: Config, layout: Layout) -> None:
    """At r = 1 both are -A; off policy they differ where ppo_clip's clipping acts."""
    policy = Policy(config, layout)
    batch = load_batch(policy)
    own = policy.log_probs(batch)
    for old, alike in ((own, True), (nearby_log_probs(batch, own), False)):
        batch.set_old_log_probs(old)
        found = []
        for loss in ("ppo_clip", "cispo"):
            gradients(policy, batch, loss=loss, clip={"dual": None})
            found.append(main_gradient(policy))
        assert float(found[0].norm()) > 0
        assert torch.allclose(*found, rtol=1e-5, atol=1e-6) == alike


WARMUP = {"delay": 1, "steps": 3, "low": 0.05, "high": 0.05}
CLIP = {"low": 0.35, "high": 0.65, "warmup": WARMUP}
RANGES = [(0.05, 0.05), (0.15, 0.25), (0.25, 0.45), (0.35, 0.65), (0.35, 0.65)]  # of the first steps


def clipped(metrics: Metrics) -> tuple[float, float]:
    return metrics["clip_low"], metrics["clip_high"]


def steps(policy: Policy, batch: Batch, count: int) -> Iterator[tuple[float, float]]:
    """Fractions of clipped tokens in rollout steps that leave the weights alone."""
    for _ in range(count):
        policy.start_step()
        yield clipped(gradients(policy, batch, clip=CLIP))


def test_clip_range_of_each_step(config: Config, layout: Layout) -> None:
    policy = Policy(config, layout)
    batch = off_policy_batch(policy)
    found = list(steps(policy, batch, len(RANGES)))
    expected = [clipped(gradients(policy, batch, clip={"low": low, "high": high})) for low, high in RANGES]
    assert found == expected
    assert found[0] > found[1] > found[2] > found[3] == found[4]
    assert found[0][1] > found[3][1] > 0


def test_clip_range_goes_on_after_a_resume(config: Config, layout: Layout) -> None:
    policy = Policy(config, layout)
    batch, state = off_policy_batch(policy), RunState(config, policy)
    for _ in steps(policy, batch, 2):
        state.finish_step({}, 0)
    restored = Policy(config, layout)
    RunState(config, restored).restore()
    third = list(steps(policy, batch, 1))
    assert list(steps(restored, batch, 1)) == third
    assert third == [clipped(gradients(restored, batch, clip={"low": 0.25, "high": 0.45}))]
