"""Optimizer states that megatron-core gathers for a save, where it then looks for them.

Gathered, the buckets of a buffer follow each other without the padding between them, but each parameter's states are
cut out at its place in the buffer, which counts the padding. Behind the first padding every state would silently be
that of other parameters: on the last stage where it has a copy of tied embeddings, which are a bucket of their own,
and in every model of more than one bucket.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@functools.cache  # a second call would spread what is in place
def keep_places() -> None:
    """Make DistributedOptimizer return gathered states with the padding of the buffers. Idempotent."""
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    @functools.wraps(gather)
    def gather_in_place(self: Any, *args: Any, **options: Any) -> Any:
        state = gather(self, *args, **options)
        if state is not None:
            for i, buffer in enumerate(self.buffers):
                for tensors in state[i].values():
                    for key in ("param", "exp_avg", "exp_avg_sq"):
                        tensors[key] = _spread(tensors[key], buffer)
        return state

    DistributedOptimizer.get_parameter_state_dp_zero = gather_in_place
    _save_without_gathering()


def _save_without_gathering() -> None:
    """Let a rank that has the whole states of its parameters save them as they are.

    Megatron would copy them into buffers twice over, 24 bytes per parameter on every rank without data parallelism.
    """
    by_gathering = DistributedOptimizer.sharded_param_state_fully_reshardable

    @functools.wraps(by_gathering)
    def states_of(self: Any, model: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        offloaded = hasattr(self.optimizer, "gpu_params_map_cpu_copy")
        if is_loading or offloaded or self.data_parallel_group.size() > 1:
            return by_gathering(self, model, is_loading, metadata)
        described = {base.data: base for base in nested_values(extract_sharded_tensors_and_factories(model)[0])}
        parameters = [parameter for buffer in self.buffers for parameter in buffer.param_index_map]
        return {i: _described(self, parameter, described[parameter]) for i, parameter in enumerate(parameters)}

    DistributedOptimizer.sharded_param_state_fully_reshardable = states_of


def _described(optimizer: Any, parameter: torch.nn.Parameter, model: Any) -> dict[str, Any]:
    """A parameter's states, in its shape, under the keys that megatron gives them; `model` describes its weights."""
    found = {}
    for kind, state in optimizer._get_main_param_and_optimizer_states(parameter).items():
        if kind != "step":  # stands in the parameter groups
            changes = {"key": f"optimizer.state.{kind}.{model.key}", "data": state.detach().view(model.data.shape)}
            if not isinstance(model, ShardedTensorFactory):
                changes["dtype"] = state.dtype
            found[kind] = replace(model, **changes)
    return found


def _spread(gathered: Tensor, buffer: Any) -> Tensor:
    """Buckets one after the other [sum of their sizes] -> each at its place in the buffer [its size]."""
    if len(buffer.buckets) == 1:
        return gathered
    whole = torch.zeros(buffer.numel, dtype=gathered.dtype)
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    for bucket, part in zip(buffer.buckets, gathered.split(sizes), strict=True):
        whole[bucket.offset : bucket.offset + len(part)] = part
    return whole
