"""Which rank holds what of a model: layers of pipeline stages, and the owners of a parameter's shards. No torch."""

import math
from dataclasses import dataclass
from itertools import accumulate

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import EMBEDDING, Parameter


def chunk_layers(num_layers: int, parallel: ParallelConfig) -> list[range]:
    """The layers of each model chunk, in the order of the model: chunk i lies on stage i % `parallel.pipeline`."""
    chunks = parallel.pipeline * parallel.virtual_pipeline
    lengths = parallel.pipeline_layers or [num_layers // chunks] * chunks
    stops = list(accumulate(lengths))
    return [range(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]


@dataclass(frozen=True)
class Shards:
    """A parameter's shards: the rank that holds each, in order, among the fewest ranks that hold the model once."""

    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Into how many shards the parameter is split."""
        return len(self.ranks)


class Placement:
    """The owners of every parameter in a layout.

    Ranks are numbered as Megatron does without context and data parallelism: tensor-parallel ranks fastest, pipeline
    stages slowest. A stage has as many as hold each dense and each expert shard once.

    Args:
        arch: the model.
        parallel: a layout that `models.layout.check_layout` has passed.
    """

    def __init__(self, arch: Architecture, parallel: ParallelConfig) -> None:
        self.arch, self.parallel = arch, parallel
        self.per_stage = math.lcm(parallel.tensor, parallel.expert * parallel.expert_tensor)
        chunks = chunk_layers(arch.num_layers, parallel)
        self._stage_of_layer = {layer: i % parallel.pipeline for i, chunk in enumerate(chunks) for layer in chunk}

    @property
    def num_ranks(self) -> int:
        """Ranks that hold the model once."""
        return self.per_stage * self.parallel.pipeline

    def stage(self, row: Parameter) -> int:
        """The pipeline stage that holds a parameter; of tied embeddings the first, though the last has a copy."""
        if row.layer is not None:
            return self._stage_of_layer[row.layer]
        return 0 if row.name == EMBEDDING else self.parallel.pipeline - 1

    def expert_owner(self, row: Parameter) -> int:
        """The expert-parallel rank that holds a single expert's parameter."""
        assert row.expert is not None
        return row.expert // (self.arch.num_experts // self.parallel.expert)

    def shards(self, row: Parameter) -> Shards:
        """The owners of a parameter's shards. One that is not split has a single owner."""
        first = self.stage(row) * self.per_stage
        size = self.parallel.tensor
        if row.expert is not None:
            size = self.parallel.expert_tensor
            first += self.expert_owner(row) * size
        return Shards(tuple(range(first, first + (size if row.rule.split else 1))))
