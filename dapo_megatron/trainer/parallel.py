"""Process groups: torch.distributed under torchrun, and Megatron's groups on top of it."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.layout import check_ranks
from dapo_megatron.trainer import device

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Layout:
    """This rank's place. Global rank order is Megatron's: tensor fastest, then context, data and pipeline.

    `expert_rank` and `expert_tensor_rank` are the rank's place among the owners of the experts, which are spread over
    the tensor-, context- and data-parallel ranks of a pipeline stage.
    """

    rank: int
    world_size: int
    tensor: int
    tensor_rank: int
    context: int
    context_rank: int
    pipeline: int
    pipeline_rank: int
    data: int
    data_rank: int
    expert: int
    expert_rank: int
    expert_tensor: int
    expert_tensor_rank: int

    @property
    def sends_weights(self) -> bool:
        """Whether this rank takes part in exporting the weights.

        Of each pipeline stage these are the first ranks that hold every dense and every expert shard, in whole
        tensor-parallel and expert-parallel groups.
        """
        per_stage = self.world_size // self.pipeline
        return self.rank % per_stage < math.lcm(self.tensor, self.expert * self.expert_tensor)


def _megatron_state() -> dict[str, Any]:
    """Everything that Megatron keeps of a layout: groups, ranks and buffers, variables of one module."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


_NO_LAYOUT = _megatron_state()  # before any group is built


class OtherLayout:
    """A second layout on the same processes, with Megatron groups of its own beside those of `initialize`.

    A model in it must be built and run within `active`: megatron-core looks up some groups when a model is built and
    others when it runs.

    Args:
        parallel: the sizes.

    Attributes:
        layout: this rank's place in it.

    Raises:
        UserError: if the layout does not fit the number of ranks.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        check_ranks(parallel, dist.get_world_size(), "torchrun")
        self._state = _NO_LAYOUT
        with self.active():
            _build_groups(parallel)
            self.layout = _place_in(parallel)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, Megatron knows this layout alone; afterwards it has the other one back as it was."""
        first = _megatron_state()
        vars(parallel_state).update(self._state)
        try:
            yield
        finally:
            self._state = _megatron_state()
            vars(parallel_state).update(first)


def _leave_model_parallel() -> None:
    """Give up Megatron's groups. Megatron only forgets them, and each keeps its threads and connections."""
    if not parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def initialize(parallel: ParallelConfig, seed: int, threads: int | None = None) -> Layout:
    """Join the process groups (those of torchrun, or a world of one) and build Megatron's.

    Calling it again with another layout rebuilds Megatron's groups on the same processes, and ends those of every
    OtherLayout.

    Raises:
        UserError: if the layout does not fit the number of ranks or the backend.
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
    check_ranks(parallel, dist.get_world_size(), "torchrun")
    _leave_model_parallel()
    _build_groups(parallel)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return _place_in(parallel)


def _build_groups(parallel: ParallelConfig) -> None:
    """Megatron's groups. All ranks take part."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )


def _place_in(parallel: ParallelConfig) -> Layout:
    """This rank's place, of which Megatron knows the groups."""
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=parallel.tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context=parallel.context,
        context_rank=parallel_state.get_context_parallel_rank(),
        pipeline=parallel.pipeline,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert=parallel.expert,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel.expert_tensor,
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
    )
