"""The proof of a transfer plan, from the names and shapes of a model's tensors and the sizes of both sides alone.

Nothing here reads the rules by which plans are compiled: what a worker needs and what a rank holds are derived a
second time, from what the tensors are called. No torch.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from dapo_megatron.config.run import Config
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.table import parameter_table
from dapo_megatron.planning.ranks import RankPlace, rank_places
from dapo_megatron.sync.fp8_plan import fp8_plan, quantized_matrices
from dapo_megatron.sync.plan import VOCABULARY_MULTIPLE, ServerLayout, Source, TransferPlan, compile_plan
from dapo_megatron.sync.wire import Bucket, Stretch

_COLUMN = {"q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3"}
_ROW = {"o_proj", "down_proj", "w2"}
_KV = {"k_proj", "v_proj"}
_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa", "gate"}
_LAYER, _EXPERT = re.compile(r"\.layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")


_Received = tuple[Stretch, tuple[int, ...]]
"""A stretch and the workers that get it."""


class PlanError(ValueError):
    """A plan would leave a worker without bytes, give it wrong ones or ask a rank for what it has not."""


class _Tensor(NamedTuple):
    """What a tensor's name says. `kind`: vocabulary, column, row, kv or whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    layer: int | None
    expert: int | None

    @property
    def dim(self) -> int:
        """Along which it is split."""
        return 1 if self.kind == "row" else 0

    @property
    def length(self) -> int:
        return self.shape[self.dim]


def proved_plan(config: Config, arch: Architecture, num_ranks: int) -> TransferPlan:
    """The plan of every push of a run with `num_ranks` trainer ranks, proved.

    Raises:
        UserError: if the servers cannot have the layout that `fleet` asks for.
        PlanError: if the plan is wrong.
    """
    fleet, parallel = config.fleet, config.parallel
    if fleet.mode == "colocated":  # every rank has the whole model gathered, as a single one would
        parallel, num_ranks = ParallelConfig.model_validate({}), 1
    size = int(fleet.bucket_mb * (1 << 20))
    plan = compile_plan(arch, parallel, num_ranks, ServerLayout.of(fleet), dtype=fleet.dtype, bucket_bytes=size)
    prove(plan, arch, parallel, num_ranks, dtype=fleet.dtype)
    return fp8_plan(plan, quantized_matrices(arch)) if fleet.weight_format == "fp8_block" else plan


def prove(plan: TransferPlan, arch: Architecture, parallel: ParallelConfig, world_size: int, *, dtype: str) -> None:
    """Prove that a plan gives every worker exactly what it holds of the model, from ranks that hold it.

    Every tensor is there under its name, shape and dtype; the trainer's parts cover it once; its sender is the rank
    to which they are gathered; each worker gets what it needs, no byte twice and none that it does not need; and the
    order is that of the layers.

    Raises:
        PlanError: naming the tensor, the worker or rank, and the stretch.
    """
    tensors = {
        name: _tensor(name, shape, "float32" if row.is_buffer else dtype)
        for row in parameter_table(arch)
        for name, shape in zip(row.hf_names, row.rule.hf_shapes, strict=True)
    }
    received: dict[str, list[_Received]] = {name: [] for name in tensors}
    for bucket in plan.buckets:
        for stretch in bucket.stretches:
            if stretch.name not in received:
                raise PlanError(f"the plan sends {stretch.name}, which {arch.hf_class} does not have")
            received[stretch.name].append((stretch, bucket.group.workers))
    _prove_sources(plan, tensors, arch, parallel, world_size)
    _prove_order(plan, list(tensors))
    needs = _Needs(arch, plan.server)
    proved = set()  # experts are many and alike
    for name, tensor in tensors.items():
        case = (tensor[1:4], needs.place(tensor), tuple((stretch[1:], workers) for stretch, workers in received[name]))
        if case not in proved:
            _prove_received(tensor, received[name], needs)
            proved.add(case)


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> _Tensor:
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    module = name.split(".")[-2]
    if module in ("embed_tokens", "lm_head"):
        kind = "vocabulary"
    elif module in _KV:
        kind = "kv"
    elif module in _COLUMN:
        kind = "column"
    elif module in _ROW:
        kind = "row"
    elif module in _WHOLE or module.endswith("norm"):
        kind = "whole"
    else:
        raise PlanError(f"nothing is known of how servers split {name}")
    return _Tensor(name, shape, dtype, kind, int(layer[1]) if layer else None, int(expert[1]) if expert else None)


class _Needs:
    """What each worker of a server holds of each tensor."""

    def __init__(self, arch: Architecture, server: ServerLayout) -> None:
        self._arch, self._server = arch, server
        self.workers = range(server.workers)
        # vLLM's rule: what is left over goes to the stages before the last, one each, from behind.
        counts = [arch.num_layers // server.pipeline] * server.pipeline
        for i in range(arch.num_layers % server.pipeline):
            counts[-2 - i] += 1
        self._stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
        self._parts = cache(self._part)

    def of(self, tensor: _Tensor, worker: int) -> tuple[int, int]:
        """[start, stop) along the tensor's dimension; an empty stretch where it needs nothing."""
        stage, rank = divmod(worker, self._server.tensor)
        stages, owner = self.place(tensor)
        if stage not in stages or owner not in (None, rank):
            return 0, 0
        return (0, tensor.length) if owner is not None else self._parts(tensor.kind, tensor.length, rank)

    def place(self, tensor: _Tensor) -> tuple[tuple[int, ...], int | None]:
        """The stages that hold a tensor, and the tensor-parallel rank that alone does."""
        last = self._server.pipeline - 1
        if tensor.layer is not None:
            whole_expert = tensor.expert is not None and self._server.expert_parallel
            return (self._stages[tensor.layer],), self._expert_owner(tensor.expert or 0) if whole_expert else None
        if "embed_tokens" in tensor.name:
            return (0, last) if self._arch.tied_embeddings else (0,), None
        return (last,), None

    def _expert_owner(self, expert: int) -> int:
        """Blocks of experts in their order, one more on each of the first workers where they do not divide."""
        share, more = divmod(self._arch.num_experts, self._server.tensor)
        stop = 0
        for worker in range(self._server.tensor):
            stop += share + (worker < more)
            if expert < stop:
                return worker
        raise AssertionError(expert)

    def _part(self, kind: str, length: int, rank: int) -> tuple[int, int]:
        size = self._server.tensor
        if kind == "whole":
            return 0, length
        if kind == "vocabulary":
            rows = -(-length // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // size
            return min(rank * rows, length), min((rank + 1) * rows, length)
        if kind == "kv" and size > self._arch.num_kv_heads:
            copies, rows = size // self._arch.num_kv_heads, length // self._arch.num_kv_heads
            return rank // copies * rows, (rank // copies + 1) * rows
        return length // size * rank, length // size * (rank + 1)


def _prove_received(tensor: _Tensor, received: list[_Received], needs: _Needs) -> None:
    """Each worker gets the tensor's bytes that it needs, each once."""
    due = (tensor.dtype, tensor.shape, tensor.dim)
    for stretch, _ in received:
        if stretch[1:4] != due:
            raise PlanError(f"{stretch} is {stretch[1:4]}, it must be {due} (dtype, shape, dimension of the cut)")
    for worker in needs.workers:
        start, stop = needs.of(tensor, worker)
        end = start
        for stretch in sorted((s for s, workers in received if worker in workers), key=lambda s: s.start):
            if stretch.stop <= stretch.start or stretch.start < end:
                what = "bytes that it does not need" if stretch.start < start or end == start else "bytes twice"
                raise PlanError(f"worker {worker} gets {what}: {stretch}, it needs {_range(start, stop)}")
            if stretch.start > end:
                break
            end = stretch.stop
        if end < stop:
            raise PlanError(
                f"worker {worker} does not get {tensor.name}[{end}:{stop} of dim {tensor.dim}], which it needs"
            )
        if end > stop:
            raise PlanError(f"worker {worker} gets bytes of {tensor.name} past {stop} that it does not need")
        extra = [s for s, workers in received if worker in workers and s.start >= stop]
        if extra:
            raise PlanError(
                f"worker {worker} gets bytes that it does not need: {extra[0]}, it needs {_range(start, stop)}"
            )


def _range(start: int, stop: int) -> str:
    return f"[{start}:{stop}]" if stop > start else "nothing of it"


def _prove_order(plan: TransferPlan, names: Sequence[str]) -> None:
    """Turns and stretches follow the order of the model's tensors, and a turn gathers what its buckets send."""
    number = {name: i for i, name in enumerate(names)}
    last: dict[int, int] = {}  # by sender
    last_turn = -1
    for turn in plan.turns:
        rows = [name for row in turn.rows for name in row.hf_names]
        first = number.get(rows[0], -1)
        sent = {stretch.name for bucket in turn.buckets for stretch in bucket.stretches}
        if odd := sent.symmetric_difference(rows):
            raise PlanError(f"rank {turn.sender} gathers other tensors than it sends: {min(odd)}")
        if first <= last_turn or first <= last.get(turn.sender, -1):
            raise PlanError(f"{rows[0]} comes out of order on rank {turn.sender}")
        last_turn, last[turn.sender] = first, max(number[name] for name in rows)
        for bucket in turn.buckets:
            _prove_bucket(bucket, turn.sender, number)


def _prove_bucket(bucket: Bucket, sender: int, number: dict[str, int]) -> None:
    if bucket.group.sender != sender:
        raise PlanError(f"{bucket.stretches[0]} is gathered on rank {sender}, but rank {bucket.group.sender} sends it")
    places = [(number[stretch.name], stretch.start) for stretch in bucket.stretches]
    for i in range(1, len(places)):
        if places[i] <= places[i - 1]:
            raise PlanError(f"{bucket.stretches[i]} comes out of order on rank {sender}")


def _prove_sources(
    plan: TransferPlan,
    tensors: dict[str, _Tensor],
    arch: Architecture,
    parallel: ParallelConfig,
    world_size: int,
) -> None:
    """Each tensor's parts lie where the plan says, cover it once, and are gathered to the first of their holders."""
    holders = _Holders(arch, parallel, world_size)
    sender = {name: turn.sender for turn in plan.turns for row in turn.rows for name in row.hf_names}
    for tensor in tensors.values():
        due = holders.of(tensor)
        found = plan.sources.get(tensor.name, ())
        if sorted(_joined(found)) != due:
            wrong = next((str(tuple(s)) for s in found if tuple(s) not in due), "nobody")
            raise PlanError(f"{tensor.name}: the plan takes it from {wrong}; its holders (rank, start, stop) are {due}")
        if tensor.name not in sender:
            raise PlanError(f"no rank sends {tensor.name}")
        if sender[tensor.name] != due[0][0]:
            raise PlanError(f"{tensor.name} is sent by rank {sender[tensor.name]}, but gathered to rank {due[0][0]}")


def _joined(sources: Sequence[Source]) -> list[tuple[int, int, int]]:
    """Sources with what follows on the same rank joined to one, without those that hold padding alone."""
    joined: list[tuple[int, int, int]] = []
    for source in sources:
        if source.start == source.stop:
            continue
        if joined and joined[-1][0] == source.rank and joined[-1][2] == source.start:
            joined[-1] = (source.rank, joined[-1][1], source.stop)
        else:
            joined.append((source.rank, source.start, source.stop))
    return joined


class _Holders:
    """Which trainer ranks hold which part of a tensor: the first rank with each shard."""

    def __init__(self, arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
        self._arch, self._parallel = arch, parallel
        self._dense: dict[tuple[int, int], int] = {}
        self._experts: dict[tuple[int, int, int], int] = {}
        self._stage_of_layer: dict[int, int] = {}
        for place in reversed(rank_places(parallel, world_size, arch.num_layers)):
            self._enter(place)
        self._parts = cache(self._part)

    def _enter(self, place: RankPlace) -> None:
        self._dense[place.pipeline, place.tensor] = place.rank
        self._experts[place.pipeline, place.expert, place.expert_tensor] = place.rank
        self._stage_of_layer |= {layer: place.pipeline for chunk in place.layers for layer in chunk}

    def of(self, tensor: _Tensor) -> list[tuple[int, int, int]]:
        """(rank, start, stop), in the order of the ranks; a tensor that all have whole is the first one's."""
        if tensor.layer is not None:
            stage = self._stage_of_layer[tensor.layer]
        else:
            stage = 0 if "embed_tokens" in tensor.name else self._parallel.pipeline - 1
        expert = None
        if tensor.expert is not None:
            expert = tensor.expert // (self._arch.num_experts // self._parallel.expert)
        return self._parts(stage, expert, tensor.kind, tensor.length)

    def _part(self, stage: int, expert: int | None, kind: str, length: int) -> list[tuple[int, int, int]]:
        size = self._parallel.tensor if expert is None else self._parallel.expert_tensor
        held = []
        for rank in range(1 if kind == "whole" else size):
            start, stop = (0, length) if kind == "whole" else _trainer_share(length, rank, size)
            if stop > start:
                owner = self._dense[stage, rank] if expert is None else self._experts[stage, expert, rank]
                held.append((owner, start, stop))
        return held


def _trainer_share(length: int, rank: int, size: int) -> tuple[int, int]:
    """Equal parts, the last ones shorter or empty where a vocabulary does not divide."""
    rows = -(-length // size)
    return min(rank * rows, length), min((rank + 1) * rows, length)
