"""Megatron's data-parallel wrapper, distributed optimizer and learning-rate schedule."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from dapo_megatron.config.training import OptimizerConfig
from dapo_megatron.trainer.build import PolicyModel


def wrap_data_parallel(model: PolicyModel) -> DistributedDataParallel:
    """Gradient buffers in fp32, reduced by scatter so that each rank updates its share of the parameters."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(model.config, config, model)


def build_optimizer(
    model: DistributedDataParallel, config: OptimizerConfig, masters: dict[str, Tensor]
) -> MegatronOptimizer:
    """AdamW with sharded states, its fp32 master weights taken from `masters`.

    Args:
        model: the wrapped model.
        config: the optimizer section.
        masters: local shards in the precision of the checkpoint, by parameter name. Masters copied from bf16
            parameters would start on the bf16 grid, and small steps would vanish.
    """
    dtype = model.module.config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = isinstance(inner, torch.optim.AdamW)  # one pass over memory instead of several
    if dtype != torch.float32:
        optimizer.reload_model_params(state_dict={"model": masters})
    return optimizer


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch (or Transformer Engine, or apex) optimizers under Megatron's wrappers."""
    chained: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member.optimizer for member in chained]


def build_scheduler(optimizer: MegatronOptimizer, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Linear warm-up over `warmup_steps` rollout steps, then constant.

    `step(1)` before the updates of a rollout step: the first of w warm-up steps runs at lr / w.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.warmup_steps + 1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
