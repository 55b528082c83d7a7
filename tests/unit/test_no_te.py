"""Fixes of megatron-core without Transformer Engine: what breaks without each, and that they hold."""

from collections.abc import Callable
from pathlib import Path

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from dapo_megatron.config.run import Config
from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.trainer import no_te
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import load_batch, make_config


def update(policy: Policy) -> None:
    """One optimizer step on a fixed batch."""
    batch = load_batch(policy)
    batch.set_old_log_probs(policy.log_probs(batch))
    policy.start_step()
    for mini_batch in batch.mini_batches():
        policy.update(mini_batch)


def steps(policy: Policy) -> list[torch.Tensor]:
    return [state["step"] for inner in inner_optimizers(policy.optimizer) for state in inner.state.values()]


@pytest.fixture
def config(checkpoint: Callable[..., Path], tmp_path: Path) -> Config:
    return make_config(checkpoint(), run={"dir": str(tmp_path), "save_every": 1})


@pytest.fixture
def saved(config: Config, layout: Layout) -> Policy:
    """A policy that was updated once and saved."""
    policy = Policy(config, layout)
    update(policy)
    RunState(config, policy).finish_step({}, 1)
    return policy


def test_each_parameter_counts_its_own_steps_after_a_load(saved: Policy, config: Config, layout: Layout) -> None:
    restored = Policy(config, layout)
    RunState(config, restored).restore()
    assert {float(step) for step in steps(restored)} == {1.0}
    for policy in (saved, restored):
        update(policy)
    assert {float(step) for step in steps(restored)} == {2.0}
    for ours, theirs in zip(saved.chunks[0].parameters(), restored.chunks[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_the_fix_one_counter_is_shared_and_training_goes_astray(
    saved: Policy, config: Config, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = Policy(config, layout)
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", DistributedOptimizer.load_state_dict.__wrapped__)
    RunState(config, restored).restore()
    assert len({step.data_ptr() for step in steps(restored)}) == 1
    for policy in (saved, restored):
        update(policy)
    assert float(steps(restored)[0]) > 2.0
    pairs = zip(saved.chunks[0].parameters(), restored.chunks[0].parameters(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_without_the_fix_a_saved_state_cannot_be_copied_into_the_optimizer(
    saved: Policy, config: Config, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_set_main_param_and_optimizer_states"
    monkeypatch.setattr(DistributedOptimizer, name, getattr(DistributedOptimizer, name).__wrapped__)
    with pytest.raises((KeyError, RuntimeError)):
        RunState(config, Policy(config, layout)).restore()


def route() -> torch.Tensor:
    return moe_utils.router_gating_linear(torch.ones(3, 2), torch.full((4, 2), 0.5), None, torch.float32)


def test_moe_router(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(route(), torch.ones(3, 4))
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    with pytest.raises(NameError):
        route()


def test_latent_attention(layout: Layout, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(checkpoint("deepseek_v3", tied=False))
    Policy(config, layout)
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)
    with pytest.raises(TypeError, match="isinstance"):
        Policy(config, layout)


def recompute() -> torch.Tensor | None:
    """Gradient of sum(x^3), where x^2 is discarded and computed again."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    checkpoint = CheckpointWithoutOutput(fp8=False)
    result = checkpoint.checkpoint(torch.square, x) * x
    checkpoint.discard_output_and_register_recompute(result)
    result.sum().backward()
    return x.grad


@pytest.mark.usefixtures("layout")
def test_recompute_without_output(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = recompute()
    assert gradient is not None
    assert gradient.tolist() == [3.0, 12.0]
    monkeypatch.setattr(CheckpointWithoutOutput, "__init__", CheckpointWithoutOutput.__init__.__wrapped__)
    with pytest.raises(NameError):
        recompute()


def test_nothing_is_fixed_where_transformer_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_te, "has_te", lambda: True)
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)
    before = DistributedOptimizer.load_state_dict, CheckpointWithoutOutput.__init__
    no_te.apply.__wrapped__()
    assert not hasattr(moe_utils, "te_general_gemm")
    assert multi_latent_attention.HAVE_TE
    assert (DistributedOptimizer.load_state_dict, CheckpointWithoutOutput.__init__) == before


def test_a_second_call_changes_nothing() -> None:
    before = DistributedOptimizer.load_state_dict, CheckpointWithoutOutput.__init__
    no_te.apply()
    assert (DistributedOptimizer.load_state_dict, CheckpointWithoutOutput.__init__) == before
