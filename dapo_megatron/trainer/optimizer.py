"""Megatron's data-parallel wrapper, distributed optimizer and learning-rate schedule."""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from dapo_megatron.config.training import OptimizerConfig, TrainingConfig
from dapo_megatron.trainer.build import ModelChunk
from dapo_megatron.trainer.precision import ddp_fields, optimizer_fields


def wrap_data_parallel(chunks: Sequence[ModelChunk], training: TrainingConfig) -> list[DistributedDataParallel]:
    """Gradient buffers in fp32, reduced by scatter so that each rank updates its share of the parameters."""
    config = DistributedDataParallelConfig(**ddp_fields(training))
    # The first chunk's gradients come last in a backward pass: only they are worth splitting into buckets.
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    training: TrainingConfig,
    masters: Sequence[dict[str, Tensor]],
) -> MegatronOptimizer:
    """AdamW with sharded states, its fp32 master weights taken from `masters`.

    Args:
        chunks: the wrapped model chunks of this rank.
        config: the optimizer section.
        training: precision.
        masters: for each chunk, local shards in the precision of the checkpoint, by parameter name. Masters copied
            from bf16 parameters would start on the bf16 grid, and small steps would vanish.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=True,
            **optimizer_fields(training, config),
        ),
        list(chunks),
    )
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"] = True  # one pass over memory instead of several
    sources = {
        parameter: shards[name]
        for chunk, shards in zip(chunks, masters, strict=True)
        for name, parameter in chunk.module.named_parameters()
    }
    for member in _members(optimizer):
        _set_masters(member, sources)
    return optimizer


@torch.no_grad()
def _set_masters(optimizer: DistributedOptimizer, sources: dict[torch.nn.Parameter, Tensor]) -> None:
    """Copy each shard of a 16-bit parameter from its source. Megatron's own way finds sources by parts of names.

    An optimizer whose states are offloaded has copies of these shards in host memory, which follow.
    """
    for parameters, shards in zip(
        optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, shard in zip(parameters, shards, strict=True):
            if shard is not None:
                stretch = optimizer._get_model_param_range_map(parameter)["param"]
                shard.copy_(sources[parameter].view(-1)[stretch.start : stretch.end])
    offloaded: dict[Tensor, Tensor] = getattr(optimizer.optimizer, "gpu_params_map_cpu_copy", {})
    for shard, copy in offloaded.items():
        copy.copy_(shard)


def _members(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """One optimizer for dense parameters and one for experts, where there are any."""
    members: list[DistributedOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return members


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch (or Transformer Engine, or apex) optimizers under Megatron's wrappers."""
    return [member.optimizer for member in _members(optimizer)]


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
