"""How a layout and a model become megatron-core's configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_helpers import LLAMA, QWEN3_MOE

from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models.families import llama, qwen3_moe
from dapo_megatron.trainer.model_config import transformer_config
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import load_batch, make_config

DENSE, EXPERTS = llama.architecture(LLAMA), qwen3_moe.architecture(QWEN3_MOE)


def megatron(arch: Any = DENSE, training: dict[str, Any] | None = None, **sizes: Any) -> Any:
    return transformer_config(
        arch, ParallelConfig.model_validate(sizes), TrainingConfig.model_validate(training or {}), "local"
    )


def test_layout_reaches_megatron() -> None:
    config = megatron(
        EXPERTS, tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, context=2, expert=4, expert_tensor=2
    )
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert (config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size) == (2, 2)
    assert config.context_parallel_size == 2
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 2)


@pytest.mark.parametrize("how", ["p2p", "all_gather", "a2a"])
def test_exchange_of_keys_and_values_reaches_transformer_engine(how: str) -> None:
    assert megatron(context=3, context_comm=how).cp_comm_type == how


@pytest.mark.parametrize(("chunks", "interleaved"), [(1, False), (2, True)])
def test_interleaved_pipelines_never_batch_their_transfers(chunks: int, interleaved: bool) -> None:
    """Batched, two stages mix up the directions: wrong gradients without an error."""
    config = megatron(EXPERTS, pipeline=2, virtual_pipeline=chunks)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (interleaved, not interleaved)
    assert config.variable_seq_lengths is not interleaved


def test_experts_reach_megatron() -> None:
    config = megatron(EXPERTS)
    assert (config.num_moe_experts, config.moe_router_topk) == (EXPERTS.num_experts, EXPERTS.experts_per_token)
    assert config.moe_ffn_hidden_size == EXPERTS.expert_ffn_size
    assert config.moe_router_load_balancing_type == "none"
    assert config.moe_expert_capacity_factor is None  # no token is dropped
    balanced = megatron(EXPERTS, {"moe_aux_loss": 0.01})
    assert (balanced.moe_router_load_balancing_type, balanced.moe_aux_loss_coeff) == ("aux_loss", 0.01)


def test_load_balancing_loss_acts_only_when_asked(layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """It adds a gradient, although without advantages there is none from the policy's loss."""
    norms = {}
    for coefficient in (0.0, 1.0):
        config = make_config(checkpoint("qwen3_moe"), training={"moe_aux_loss": coefficient})
        policy = Policy(config, layout)
        batch = load_batch(policy)
        batch.set_old_log_probs(policy.log_probs(batch))
        for micro in batch.micro_batches():
            micro.advantages.zero_()
        (mini_batch,) = batch.mini_batches()
        policy.gradients(mini_batch)
        norms[coefficient] = {
            name: float(parameter.main_grad.norm()) for name, parameter in policy.chunks[0].named_parameters()
        }
    assert set(norms[0.0].values()) == {0.0}
    assert all(norm > 0 for name, norm in norms[1.0].items() if name.endswith("router.weight"))
    assert norms[1.0]["decoder.final_layernorm.weight"] == 0.0  # behind the last router
