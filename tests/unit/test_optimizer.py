"""AdamW under Megatron: the schedule, fp32 master weights, and single updates."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dapo_megatron.trainer.batching import build_batch, plan_batch
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import MAXIMA, MEANS, Policy, combine
from dapo_megatron.types import TokenBlock
from tests.batches import load_batch, make_config

Make = Callable[..., Policy]


@pytest.fixture
def make_policy(layout: Layout, checkpoint: Callable[..., Path]) -> Make:
    """A tiny policy; arguments are fields of the optimizer section."""

    def make(precision: str = "fp32", **optimizer: Any) -> Policy:
        config = make_config(checkpoint(), training={"precision": precision}, optimizer=optimizer)
        return Policy(config, layout)

    return make


def update(policy: Policy) -> dict[str, float]:
    batch = load_batch(policy)
    batch.set_old_log_probs(policy.log_probs(batch))
    policy.start_step()
    (mini_batch,) = batch.mini_batches()
    return policy.update(mini_batch)


def masters(policy: Policy) -> dict[str, Tensor]:
    """fp32 master weights by parameter name, in the parameters' shape (one rank holds all of them)."""
    (member,) = policy.optimizer.chained_optimizers
    names = {parameter: name for name, parameter in policy.ddp[0].module.named_parameters()}
    groups = zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
    return {
        names[parameter]: master.view(parameter.shape)
        for parameters, shards in groups
        for parameter, master in zip(parameters, shards, strict=True)
    }


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [(3, [1 / 3, 2 / 3, 1, 1, 1]), (0, [1, 1, 1]), (1, [1, 1])],
)
def test_learning_rate_by_rollout_step(make_policy: Make, warmup: int, expected: list[float]) -> None:
    policy = make_policy(lr=2e-4, warmup_steps=warmup, weight_decay=0.3)
    for fraction in expected:
        policy.start_step()
        for group in policy.optimizer.param_groups:
            assert group["lr"] == pytest.approx(2e-4 * fraction)
            assert group["weight_decay"] in (0.0, 0.3)


def test_settings_reach_adam(make_policy: Make) -> None:
    policy = make_policy(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.25)
    (inner,) = inner_optimizers(policy.optimizer)
    assert isinstance(inner, torch.optim.AdamW)
    for group in inner.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)
        assert group["fused"]
    assert {group["weight_decay"] for group in inner.param_groups} == {0.25, 0.0}  # none on norms and biases


def test_first_update_is_that_of_adamw(make_policy: Make) -> None:
    """w - lr (g / (|g| + eps) + decay w), where the decay leaves out norms and biases."""
    policy = make_policy(lr=1e-2, eps=1e-12, weight_decay=0.5, clip_grad=0.0)
    before = {name: p.detach().clone() for name, p in policy.chunks[0].named_parameters()}
    update(policy)
    for name, parameter in policy.chunks[0].named_parameters():
        gradient = parameter.main_grad
        decay = 0.5 if parameter.ndim == 2 else 0.0
        expected = before[name] - 1e-2 * (gradient.sign() + decay * before[name])
        moved = gradient.abs() > 1e-8
        torch.testing.assert_close(parameter.detach()[moved], expected[moved], atol=1e-5, rtol=1e-4)


def test_gradient_is_clipped_to_its_norm(make_policy: Make) -> None:
    norms = {}
    for limit in (0.0, 1e-3):
        policy = make_policy(clip_grad=limit, beta1=0.0)
        metrics = update(policy)
        (inner,) = inner_optimizers(policy.optimizer)
        norms[limit] = torch.stack([state["exp_avg"].norm() for state in inner.state.values()]).norm()
        assert metrics["grad_norm"] > 1e-3
    assert float(norms[1e-3]) == pytest.approx(1e-3, rel=1e-3)
    assert float(norms[0.0]) == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_master_weights_come_from_the_checkpoint(make_policy: Make, checkpoint: Callable[..., Path]) -> None:
    """Copies of the bf16 parameters would lie on the bf16 grid."""
    policy = make_policy("bf16")
    found = masters(policy)
    assert found.keys() == dict(policy.chunks[0].named_parameters()).keys()
    name = "model.layers.0.mlp.down_proj.weight"
    source = load_file(checkpoint() / "model.safetensors")[name]
    assert torch.equal(found["decoder.layers.0.mlp.linear_fc2.weight"], source)
    for name, parameter in policy.chunks[0].named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, found[name].bfloat16()), name
        assert not torch.equal(found[name], parameter.float()), f"{name} lies on the bf16 grid"


def test_steps_far_below_the_bf16_grid_add_up(make_policy: Make) -> None:
    """10 updates of 1e-6 move a master weight by about 1e-5, where neighbours of 0.02 in bf16 are 1.2e-4 apart."""
    policy = make_policy("bf16", lr=1e-6, warmup_steps=0, weight_decay=0.0)
    before = {name: master.clone() for name, master in masters(policy).items()}
    batch = load_batch(policy)
    batch.set_old_log_probs(policy.log_probs(batch))
    policy.start_step()
    (mini_batch,) = batch.mini_batches()
    for _ in range(10):
        policy.update(mini_batch)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    moved = (masters(policy)[name] - before[name]).abs()
    assert 5e-6 < float(moved.median()) < 2e-5


def test_bf16_trains_as_fp32_does(make_policy: Make) -> None:
    """The same weights after a few steps, up to what bf16 forward and backward passes cost."""
    changes = []
    for precision in ("fp32", "bf16"):
        policy = make_policy(precision, lr=1e-3, weight_decay=0.0)
        name = "decoder.layers.1.self_attention.linear_proj.weight"
        weights = masters(policy) if precision == "bf16" else dict(policy.chunks[0].named_parameters())
        before = weights[name].detach().clone()
        for _ in range(3):
            update(policy)
        changes.append((weights[name].detach() - before).flatten())
    assert float(torch.cosine_similarity(*changes, dim=0)) > 0.9


def test_metrics_of_an_update(make_policy: Make) -> None:
    metrics = update(make_policy(lr=5e-4, warmup_steps=2))
    assert metrics.keys() == {*MEANS, *MAXIMA, "loss", "grad_norm", "lr", "skipped_updates"}
    assert metrics["log_ratio_abs"] == 0.0  # law 6
    assert metrics["ratio_max"] == 1.0
    assert metrics["lr"] == pytest.approx(2.5e-4)
    assert metrics["rollout_diff_max"] > metrics["rollout_diff"] > 0


def test_metrics_of_a_step() -> None:
    names = (*MEANS, *MAXIMA)
    first, second = (dict.fromkeys(names, value) for value in (1.0, 3.0))
    first["clip_high"] = 0.0  # nothing was clipped above, so that the second update's probability is the step's
    first["clip_high_probability"] = 0.0
    combined = combine([first, second])
    shares = {"clip_high": 1.5, "clip_high_probability": 1.0}
    assert {name: combined[name] for name in MEANS} == dict.fromkeys(MEANS, 2.0) | shares
    assert all(combined[name] == 3.0 for name in MAXIMA)
    assert combined["first_log_ratio"] == 1.0
    assert combine([first, second], recomputed=False) == {name: combined[name] for name in names}
    assert combine([]) == {}
    assert math.isnan(combine([first])["clip_high_probability"])


def test_an_update_that_overflows_fp16_is_skipped_and_counted(make_policy: Make) -> None:
    policy = make_policy("fp16", lr=1e-3)
    before = {name: p.detach().clone() for name, p in policy.chunks[0].named_parameters()}
    (scaler,) = {member.grad_scaler for member in policy.optimizer.chained_optimizers}
    scaler._scale.fill_(2.0**40)
    metrics = update(policy)
    assert metrics["skipped_updates"] == 1.0
    assert all(torch.equal(before[name], p) for name, p in policy.chunks[0].named_parameters())
    assert float(scaler.scale) == 2.0**39
    scaler._scale.fill_(2.0**8)
    metrics = update(policy)
    assert metrics["skipped_updates"] == 0.0
    assert metrics["grad_norm"] > 0
    assert not all(torch.equal(before[name], p) for name, p in policy.chunks[0].named_parameters())


def test_a_mini_batch_without_tokens_changes_nothing(make_policy: Make) -> None:
    """All its responses were filtered; momentum would otherwise go on moving the weights."""
    policy = make_policy(lr=1e-3)
    update(policy)
    before = {name: p.detach().clone() for name, p in policy.chunks[0].named_parameters()}
    batch = load_batch(policy)
    empty = replace(batch.header, truncated=np.ones(batch.header.num_responses, bool))
    rules = replace(policy.packing, filter_truncated=True)
    none = np.zeros(0, np.int32)
    tokens = TokenBlock(none, none, none, none, none, np.zeros(0, np.float32))
    built = build_batch(
        empty, plan_batch(empty, rules), tokens, rules, data_rank=0, context_rank=0, device=torch.device("cpu")
    )
    built.set_advantages(torch.zeros(empty.num_responses))
    built.set_old_log_probs(policy.log_probs(built))
    (mini_batch,) = built.mini_batches()
    metrics = policy.update(mini_batch)
    assert (metrics["skipped_updates"], metrics["loss"]) == (1.0, 0.0)
    assert all(torch.equal(before[name], p) for name, p in policy.chunks[0].named_parameters())
