"""Process groups: torch.distributed under torchrun, and Megatron's groups on top of it."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.trainer import device

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Layout:
    """This rank's place. Global rank order is Megatron's: tensor fastest, then data, then pipeline."""

    rank: int
    world_size: int
    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    data: int
    data_rank: int

    @property
    def sends_weights(self) -> bool:
        """Whether this rank's replica is the one that is exported and pushed."""
        return self.data_rank == 0


def initialize(parallel: ParallelConfig, seed: int, threads: int | None = None) -> Layout:
    """Join the process groups (those of torchrun, or a world of one) and build Megatron's.

    Calling it again with another layout rebuilds Megatron's groups on the same processes.

    Raises:
        UserError: if the number of ranks is not a multiple of tensor x pipeline.
    """
    if not dist.is_initialized():
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        cores = len(os.sched_getaffinity(0))
        device.set_device(int(os.environ.get("LOCAL_RANK", 0)), threads or max(1, cores // local_ranks))
        if "RANK" in os.environ:
            dist.init_process_group(device.backend(), timeout=COLLECTIVE_TIMEOUT)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(device.backend(), rank=0, world_size=1, store=store)
    model_ranks = parallel.tensor * parallel.pipeline
    if dist.get_world_size() % model_ranks:
        raise UserError(
            f"parallel.tensor x parallel.pipeline ({parallel.tensor} x {parallel.pipeline}) must divide "
            f"the number of ranks ({dist.get_world_size()})"
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor, pipeline_model_parallel_size=parallel.pipeline
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=parallel.tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel.pipeline,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
    )
