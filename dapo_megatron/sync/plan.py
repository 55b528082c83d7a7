"""Which bytes of a weight push go from which trainer rank to which worker of every server. Geometry alone, no torch.

A tensor is cut where the parts that the servers' workers need begin and end; what the same workers need travels in the
same broadcasts, so that a worker gets what it holds and nothing else. `sync/proof.py` proves a plan before it is used.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import EMBEDDING, OUTPUT, Parameter
from dapo_megatron.models.placement import Placement
from dapo_megatron.models.rules import FusedQKV, Rule
from dapo_megatron.models.table import parameter_table
from dapo_megatron.sync.wire import ITEM_BYTES, Bucket, Group, Stretch

VOCABULARY_MULTIPLE = 64  # vLLM pads a vocabulary to a multiple of it before it splits it


@dataclass(frozen=True)
class ServerLayout:
    """How each server spreads the model over its workers: worker = pipeline stage x `tensor` + tensor rank.

    `expert_parallel`: the workers of a stage hold whole experts, each as many, instead of a part of every expert.
    """

    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(cls, fleet: FleetConfig) -> "ServerLayout":
        """That of the fleet's servers."""
        return cls(fleet.tensor, fleet.pipeline, fleet.expert_parallel)

    @property
    def workers(self) -> int:
        """Workers of one server."""
        return self.tensor * self.pipeline


class Source(NamedTuple):
    """The trainer rank that holds [start, stop) of a tensor along its rule's dimension; it may be padding alone."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Turn:
    """What one sender gathers at a time: rows of the parameter table, and the buckets in which their tensors leave."""

    sender: int
    rows: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class TransferPlan:
    """A push, turn by turn; all ranks and all workers follow the same order.

    Attributes:
        turns: layer by layer; within a layer in the order of the parameter table.
        sources: for every tensor, by name, who holds which part of it. The parts are gathered to its sender.
        server: the layout of each server.
    """

    turns: tuple[Turn, ...]
    sources: dict[str, tuple[Source, ...]]
    server: ServerLayout

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All broadcasts, in their order."""
        return tuple(bucket for turn in self.turns for bucket in turn.buckets)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all broadcasts, in the order of their first ones."""
        return tuple(dict.fromkeys(bucket.group for bucket in self.buckets))

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """Trainer ranks that send, ascending."""
        return tuple(sorted({turn.sender for turn in self.turns}))

    @property
    def num_tensors(self) -> int:
        """Tensors that are pushed."""
        return len(self.sources)

    def shared_rows(self, rank: int, turn: Turn) -> list[Parameter]:
        """The rows of a turn of which trainer rank `rank` holds a shard: those in whose gathering it takes part."""
        return [row for row in turn.rows if any(held.rank == rank for held in self.sources[row.hf_names[0]])]

    def of_server(self, position: int) -> "TransferPlan":
        """What the server at `position` among those of a push gets: all get the same."""
        return self

    def received(self, worker: int) -> Iterator[Bucket]:
        """The buckets that this worker of every server receives."""
        return (bucket for bucket in self.buckets if worker in bucket.group.workers)


def compile_plan(
    arch: Architecture,
    parallel: ParallelConfig,
    world_size: int,
    server: ServerLayout,
    *,
    dtype: str,
    bucket_bytes: int,
) -> TransferPlan:
    """The plan of every push of a run.

    Args:
        arch: the model.
        parallel: the trainer's layout, which `models.layout` has passed.
        world_size: number of trainer ranks.
        server: the servers' layout.
        dtype: what travels, but for tensors that are fp32 in any model.
        bucket_bytes: largest sum of a turn's bytes; a row of the table that is larger has a turn of its own.

    Raises:
        UserError: if the servers cannot have that layout.
    """
    check_server(arch, server)
    owners, cutter = _Owners(arch, parallel, world_size), _Cutter(arch, server)
    turns: list[tuple[int, Turn]] = []
    open_turns: dict[int, _OpenTurn] = {}
    sources: dict[str, tuple[Source, ...]] = {}
    for number, row in enumerate(parameter_table(arch)):
        sender = owners.sender(row)
        sources |= zip(row.hf_names, owners.sources(row, sender), strict=True)
        travels_as = "float32" if row.is_buffer else dtype
        cuts = cutter.stretches(row, travels_as)
        nbytes = _numel(row.rule) * ITEM_BYTES[travels_as]
        turn = open_turns.get(sender)
        if turn is None or turn.nbytes + nbytes > bucket_bytes:
            if turn is not None:
                turns.append(turn.closed())
            turn = open_turns[sender] = _OpenTurn(number, sender)
        turn.add(row, cuts, nbytes)
    turns += [turn.closed() for turn in open_turns.values()]
    turns.sort(key=lambda numbered: numbered[0])
    return TransferPlan(tuple(turn for _, turn in turns), sources, server)


def check_server(arch: Architecture, server: ServerLayout) -> None:
    """Refuse a layout that vLLM cannot give the model.

    Raises:
        UserError: naming the key and the rule.
    """
    tensor = server.tensor
    sizes = {f"{arch.num_heads} attention heads": arch.num_heads}
    sizes["the padded vocabulary"] = _padded_vocabulary(arch)
    if arch.has_dense_layers:
        sizes[f"the MLP size {arch.ffn_size}"] = arch.ffn_size
    if arch.shared_ffn_size:
        sizes[f"the MLP size {arch.shared_ffn_size} of the shared experts"] = arch.shared_ffn_size
    if arch.num_experts and not server.expert_parallel:
        sizes[f"the MLP size {arch.expert_ffn_size} of each expert"] = arch.expert_ffn_size
    for what, size in sizes.items():
        if size % tensor:
            raise UserError(f"fleet.tensor={tensor} does not divide {what}")
    if arch.num_kv_heads % tensor and tensor % arch.num_kv_heads:
        raise UserError(
            f"fleet.tensor={tensor} must divide the {arch.num_kv_heads} key/value heads, or be a multiple of them"
        )
    if server.pipeline > arch.num_layers:
        raise UserError(f"fleet.pipeline={server.pipeline} exceeds the {arch.num_layers} layers")
    if server.expert_parallel and not arch.num_experts:
        raise UserError(f"fleet.expert_parallel=true needs a model with experts; {arch.hf_class} has none")
    if server.expert_parallel and arch.num_experts < tensor:
        raise UserError(
            f"fleet.expert_parallel=true spreads {arch.num_experts} experts over fleet.tensor={tensor} workers: "
            "each must have one"
        )


Part = tuple[int, int] | None
"""What a worker needs of a tensor along the rule's dimension; None: nothing."""

Cut = tuple[int, int, tuple[int, ...]]
"""A stretch [start, stop) and the workers that need it."""


class _OpenTurn:
    """A turn that rows are still added to. `number` is that of its first row in the table."""

    def __init__(self, number: int, sender: int) -> None:
        self.number, self.sender, self.nbytes = number, sender, 0
        self.rows: list[Parameter] = []
        self.stretches: dict[tuple[int, ...], list[Stretch]] = {}

    def add(self, row: Parameter, cuts: Sequence[tuple[Stretch, tuple[int, ...]]], nbytes: int) -> None:
        self.rows.append(row)
        self.nbytes += nbytes
        for stretch, workers in cuts:
            self.stretches.setdefault(workers, []).append(stretch)

    def closed(self) -> tuple[int, Turn]:
        buckets = (Bucket(Group(self.sender, workers), tuple(found)) for workers, found in self.stretches.items())
        return self.number, Turn(self.sender, tuple(self.rows), tuple(buckets))


class _Owners:
    """Which trainer rank holds and which sends what: those of the first data- and context-parallel ranks.

    The sender of a dense tensor is the stage's tensor-parallel rank 0, that of an expert its owner's expert-tensor-
    parallel rank 0. Of tied embeddings the first stage's copy is sent.
    """

    def __init__(self, arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
        self._placement = Placement(arch, parallel)
        self._parallel, self._per_stage = parallel, world_size // parallel.pipeline

    def sender(self, row: Parameter) -> int:
        first = self._placement.stage(row) * self._per_stage
        if row.expert is not None:
            first += self._placement.expert_owner(row) * self._parallel.expert_tensor
        return first

    def sources(self, row: Parameter, first: int) -> list[tuple[Source, ...]]:
        """For each of the row's tensors who holds which part of it; `first` is the rank of the first part."""
        size = self._parallel.tensor if row.expert is None else self._parallel.expert_tensor
        return _shards(row.rule, first, size if row.rule.split else 1)


@cache
def _shards(rule: Rule, first: int, size: int) -> list[tuple[Source, ...]]:
    """For each of the rule's tensors which of `size` ranks from `first` on holds which part."""
    held: list[list[Source]] = [[] for _ in rule.hf_shapes]
    for rank in range(size):
        for piece in rule.pieces(rank, size):
            held[piece.source].append(Source(first + rank, piece.start, piece.stop))
    return [tuple(parts) for parts in held]


@cache
def _numel(rule: Rule) -> int:
    """Elements of all of the rule's tensors."""
    return sum(map(math.prod, rule.hf_shapes))


class _Cutter:
    """Cuts tensors where the parts of the servers' workers begin and end."""

    def __init__(self, arch: Architecture, server: ServerLayout) -> None:
        self._arch, self._server = arch, server
        bounds = stage_layers(arch.num_layers, server.pipeline)
        self._stage_of_layer = [stage for stage, layers in enumerate(bounds) for _ in layers]
        self._cuts: dict[tuple[Rule, tuple[int, ...], int | None, bool], list[list[Cut]]] = {}

    def stretches(self, row: Parameter, dtype: str) -> list[tuple[Stretch, tuple[int, ...]]]:
        """Every stretch of the row's tensors, and the workers that need it."""
        owner = None
        if row.expert is not None and self._server.expert_parallel:
            owner = expert_worker(row.expert, self._arch.num_experts, self._server.tensor)
        key = (row.rule, self._stages(row), owner, row.name in (EMBEDDING, OUTPUT))
        if key not in self._cuts:
            self._cuts[key] = [_cut(self._parts(source, *key)) for source in range(len(row.hf_names))]
        return [
            (Stretch(name, dtype, shape, row.rule.dim, start, stop), workers)
            for name, shape, cuts in zip(row.hf_names, row.rule.hf_shapes, self._cuts[key], strict=True)
            for start, stop, workers in cuts
        ]

    def _stages(self, row: Parameter) -> tuple[int, ...]:
        """The stages of a server that hold a parameter."""
        last = self._server.pipeline - 1
        if row.layer is not None:
            return (self._stage_of_layer[row.layer],)
        if row.name != EMBEDDING:
            return (last,)
        return (0, last) if self._arch.tied_embeddings and last else (0,)

    def _parts(
        self, source: int, rule: Rule, stages: tuple[int, ...], owner: int | None, vocabulary: bool
    ) -> list[Part]:
        """What each worker needs of the rule's tensor number `source`."""
        tensor, length = self._server.tensor, rule.hf_shapes[source][rule.dim]
        parts: list[Part] = [None] * self._server.workers
        for stage in stages:
            for rank in range(tensor):
                part: Part
                if owner is not None:
                    part = (0, length) if rank == owner else None
                elif not rule.split:
                    part = (0, length)
                elif vocabulary:
                    part = _clipped(rank, _padded_vocabulary(self._arch) // tensor, length)
                elif isinstance(rule, FusedQKV) and source > 0:
                    part = _kv_heads(rule, rank, tensor)
                else:
                    part = (rank * length // tensor, (rank + 1) * length // tensor)
                parts[stage * tensor + rank] = part
        return parts


def _cut(parts: Sequence[Part]) -> list[Cut]:
    """The stretches between all bounds, each with the workers whose part it belongs to."""
    bounds = sorted({bound for part in parts if part for bound in part})
    cuts = []
    for start, stop in pairwise(bounds):
        workers = tuple(i for i, part in enumerate(parts) if part and part[0] <= start and stop <= part[1])
        if workers:
            cuts.append((start, stop, workers))
    return cuts


def _clipped(rank: int, rows: int, length: int) -> Part:
    """Rows of a padded vocabulary that are not padding."""
    start, stop = rank * rows, min((rank + 1) * rows, length)
    return (start, stop) if start < stop else None


def _kv_heads(rule: FusedQKV, rank: int, size: int) -> Part:
    """Rows of keys or values: equal shares of the heads, or one head for several ranks where there are fewer heads."""
    heads = rule.num_kv_heads
    first, count = (rank * heads // size, 1) if size > heads else (rank * (heads // size), heads // size)
    return first * rule.head_dim, (first + count) * rule.head_dim


def _padded_vocabulary(arch: Architecture) -> int:
    return -(-arch.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def expert_worker(expert: int, num_experts: int, size: int) -> int:
    """Which of `size` workers holds an expert: blocks in their order, the first ones larger where it must be."""
    share, more = divmod(num_experts, size)
    larger = more * (share + 1)
    return expert // (share + 1) if expert < larger else more + (expert - larger) // share


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """Layers of a server's pipeline stages: equal, what is left over to those before the last, from behind."""
    share, more = divmod(num_layers, stages)
    counts = [share + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)]
    stops = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
