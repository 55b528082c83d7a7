"""Where each trainer rank stands in Megatron's layout and what it holds, without torch or Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.placement import chunk_layers


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
    embedding = arch.padded_vocab(parallel.tensor) // parallel.tensor * arch.hidden_size
    first, last = place.pipeline == 0, place.pipeline == parallel.pipeline - 1
    held = sum(map(len, place.layers)) * _layer_parameters(arch, parallel)
    if first:
        held += embedding
    if last:
        held += arch.hidden_size  # final norm
    if last and not (first and arch.tied_embeddings):
        held += embedding  # the output matrix; a last stage of its own has a copy of a tied one
    return held


def _layer_parameters(arch: Architecture, parallel: ParallelConfig) -> int:
    """Parameters of one layer on one rank."""
    hidden, heads_width = arch.hidden_size, arch.num_heads * arch.head_dim
    qkv_width = heads_width + 2 * arch.num_kv_heads * arch.head_dim
    split = qkv_width * hidden + heads_width * hidden + (qkv_width if arch.qkv_bias else 0)
    whole = 2 * hidden + (2 * arch.head_dim if arch.qk_norm else 0)
    if not arch.num_experts:
        return whole + (split + 3 * hidden * arch.ffn_size) // parallel.tensor
    experts = arch.num_experts // parallel.expert * 3 * hidden * arch.expert_ffn_size // parallel.expert_tensor
    return whole + arch.num_experts * hidden + split // parallel.tensor + experts
