"""Precision, FP8, recompute and offload as fields of megatron-core's configurations."""

import os
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.config.precision_rules import Machine, check_hardware, fp8_environment, parse_version
from dapo_megatron.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
from dapo_megatron.trainer import device, no_te

# FP8 replaces the operands of matrix products; everything else of an FP8 model is bf16.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}

# Megatron's 2^32 overflows at first, and every overflow costs an update, of which a step has few.
INITIAL_LOSS_SCALE = 2.0**16


def transformer_fields(training: TrainingConfig) -> dict[str, Any]:
    """Fields of TransformerConfig: precision, FP8 and recompute."""
    dtype = DTYPES[training.precision]
    fields = {"params_dtype": dtype, "pipeline_dtype": dtype, **_mixed_precision(dtype)}
    return fields | _fp8_fields(training) | _recompute_fields(training)


def optimizer_fields(training: TrainingConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Fields of megatron's OptimizerConfig: fp32 master weights, the loss scale of fp16, FP8 and offload."""
    dtype = DTYPES[training.precision]
    fields: dict[str, Any] = {"params_dtype": dtype, **_mixed_precision(dtype)}
    if training.precision == "fp16":
        fields |= {"initial_loss_scale": INITIAL_LOSS_SCALE, "hysteresis": 1}  # halved on each overflow
    if training.precision == "fp8":
        fields |= {
            "fp8_recipe": training.fp8.recipe,
            "reuse_grad_buf_for_mxfp8_param_ag": training.fp8.recipe == "mxfp8",
        }
    if optimizer.cpu_offload:
        fields |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": optimizer.cpu_offload}
    return fields


def ddp_fields(training: TrainingConfig) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig: fp32 gradients, states and masters sharded, FP8 weights gathered."""
    fp8 = training.fp8 if training.precision == "fp8" else None
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "fp8_param_gather": fp8 is not None and fp8.param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": fp8 is not None and fp8.recipe == "mxfp8",
    }


def _mixed_precision(dtype: torch.dtype) -> dict[str, bool]:
    return {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}


def _fp8_fields(training: TrainingConfig) -> dict[str, Any]:
    if training.precision != "fp8":
        return {}
    fp8 = training.fp8
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.param_gather,
        "fp8_margin": fp8.margin,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": fp8.amax_algorithm,
        "first_last_layers_bf16": fp8.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": fp8.bf16_layers_at_start,
        "num_layers_at_end_in_bf16": fp8.bf16_layers_at_end,
    }


def _recompute_fields(training: TrainingConfig) -> dict[str, Any]:
    match training.recompute:
        case "none":
            return {}
        case "full":  # one layer at a time: only each layer's input is kept
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(training.recompute_modules)}


def _capability() -> tuple[int, int] | None:
    """Of this rank's GPU, which is asked before the rank is bound to it."""
    return torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", 0))) if device.has_cuda() else None


def set_environment() -> None:
    """Set what Transformer Engine reads while it is imported, where the user has not. Call before that."""
    for name, value in fp8_environment(_capability()).items():
        os.environ.setdefault(name, value)


def this_machine() -> Machine:
    """What this rank runs on. Call after `device.set_device`."""
    cuda = torch.version.cuda
    return Machine(
        capability=_capability(),
        cuda=parse_version(cuda) if cuda else None,
        te=no_te.te_version(),
    )


def check_machine(training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig) -> None:
    """Refuse what this rank's GPU, CUDA or Transformer Engine cannot run.

    Raises:
        UserError: naming the key, what the machine has, and what is needed.
    """
    check_hardware(training, optimizer, parallel, this_machine())


def high_precision(parameter: Tensor) -> Tensor:
    """A parameter's values in the model's dtype, of its shape: an FP8 weight is no tensor that collectives can send."""
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

    values: Tensor = dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter.data
    return values
