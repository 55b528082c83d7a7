"""Where each trainer rank stands in Megatron's layout and what it holds, without torch or Megatron."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import EMBEDDING, FINAL_NORM, OUTPUT
from dapo_megatron.models.placement import chunk_layers
from dapo_megatron.models.table import parameter_table


@dataclass(frozen=True)
class RankPlace:
    """One rank's coordinates, each counted from 0, and the layers of its model chunks, one range per chunk.

    Dense weights are laid out over tensor x context x data x pipeline, those of experts over expert_tensor x expert x
    (expert data) x pipeline: the same ranks, cut another way.
    """

    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    layers: tuple[range, ...]


def rank_places(parallel: ParallelConfig, num_ranks: int, num_layers: int) -> list[RankPlace]:
    """The places of all ranks, in Megatron's order "tp-cp-ep-dp-pp": tensor fastest, pipeline slowest.

    The sizes must divide as `dapo_megatron.models.layout` checks.
    """
    stages = parallel.pipeline
    dense = (parallel.tensor, parallel.context, num_ranks // parallel.model_ranks, stages)
    expert_data = num_ranks // (parallel.expert_tensor * parallel.expert * stages)
    experts = (parallel.expert_tensor, parallel.expert, expert_data, stages)
    chunks = chunk_layers(num_layers, parallel)
    places = []
    for rank in range(num_ranks):
        tensor, context, data, pipeline = _coordinates(rank, dense)
        expert_tensor, expert, _, _ = _coordinates(rank, experts)
        layers = tuple(chunks[pipeline::stages])
        places.append(RankPlace(rank, tensor, context, data, pipeline, expert_tensor, expert, layers))
    return places


def _coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    """`rank` in the mixed base `sizes`, the fastest first."""
    coordinates = []
    for size in sizes:
        rank, coordinate = divmod(rank, size)
        coordinates.append(coordinate)
    return coordinates


def parameters_held(arch: Architecture, parallel: ParallelConfig, place: RankPlace) -> int:
    """Parameters in the memory of the rank at `place`, copies of shared ones (norms, tied embeddings) included."""
    per_layer, (embedding, norm, output) = _shard_sizes(arch, parallel.tensor, parallel.expert, parallel.expert_tensor)
    first, last = place.pipeline == 0, place.pipeline == parallel.pipeline - 1
    held = sum(per_layer[layer] for layers in place.layers for layer in layers)
    if first:
        held += embedding
    if last:
        held += norm + output
    if last and not first and arch.tied_embeddings:
        held += embedding  # a last stage of its own has a copy
    return held


@functools.cache  # all ranks of a stage hold as many
def _shard_sizes(
    arch: Architecture, tensor: int, expert: int, expert_tensor: int
) -> tuple[list[int], tuple[int, int, int]]:
    """Elements that one rank holds of each layer, and of embedding, final norm and output (0 where it is tied)."""
    layers, others = [0] * arch.num_layers, {EMBEDDING: 0, FINAL_NORM: 0, OUTPUT: 0}
    for row in parameter_table(arch):
        if row.expert is not None and row.expert >= arch.num_experts // expert:
            continue  # experts are alike: the first stand for those that a rank holds
        size = math.prod(row.rule.shard_shape(tensor if row.expert is None else expert_tensor))
        if row.layer is None:
            others[row.name] += size
        else:
            layers[row.layer] += size
    return layers, (others[EMBEDDING], others[FINAL_NORM], others[OUTPUT])
