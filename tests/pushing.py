"""Weight pushes without a trainer: one rank sends the tensors of a transformers model."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.sync.channel import Way
from dapo_megatron.sync.plan import ServerLayout, TransferPlan, compile_plan
from dapo_megatron.sync.proof import prove
from dapo_megatron.sync.pusher import Member, WeightPusher

BUCKET_BYTES = 1 << 16  # smaller than a tiny model's embedding: it has a turn of its own


def plan_of(
    model: Path, server: ServerLayout | None = None, *, dtype: str = "float32", bucket_bytes: int = BUCKET_BYTES
) -> TransferPlan:
    """The proved plan of a push from a single trainer rank."""
    arch, parallel, server = architecture_of(model), ParallelConfig.model_validate({}), server or ServerLayout()
    plan = compile_plan(arch, parallel, 1, server, dtype=dtype, bucket_bytes=bucket_bytes)
    prove(plan, arch, parallel, 1, dtype=dtype)
    return plan


class TensorSource:
    """Named tensors, as a rank's weights; `set` replaces them."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        self.set(tensors)

    def set(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """What the next push sends."""
        self._tensors = dict(tensors)

    def gather(self, row: Parameter) -> list[Tensor]:
        """The row's tensors."""
        return [self._tensors[name] for name in row.hf_names]


class Push:
    """Pushes weights from this process alone to the servers (url, token)."""

    def __init__(
        self, plan: TransferPlan, servers: Iterable[tuple[str, str]], timeout: float = 30, way: Way = "broadcast"
    ) -> None:
        self.source = TensorSource()
        self.members = [Member(url, url, token) for url, token in servers]
        self.pusher = WeightPusher(
            plan, self.source, rank=0, agree=call, host="127.0.0.1", timeout=timeout, backend="gloo", way=way
        )

    def connect(self) -> None:
        """A new incarnation with all servers."""
        self.pusher.connect(self.members)

    def __call__(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Any:
        """Pushes `tensors`."""
        self.source.set(tensors)
        return self.pusher.push(version)

    def close(self) -> None:
        """Leaves."""
        self.pusher.close()


def call(function: Callable[[], Any]) -> Any:
    """What a single rank agrees on."""
    return function()


def without(plan: TransferPlan, name: str) -> TransferPlan:
    """The plan, with a tensor left out."""
    turns = [
        replace(
            turn,
            buckets=tuple(
                replace(bucket, stretches=kept)
                for bucket in turn.buckets
                if (kept := tuple(stretch for stretch in bucket.stretches if stretch.name != name))
            ),
        )
        for turn in plan.turns
    ]
    return replace(plan, turns=tuple(turns))


def renamed(plan: TransferPlan, old: str, new: str) -> TransferPlan:
    """The plan, with a row and a stretch that go by another name."""
    turns = [
        replace(
            turn,
            rows=tuple(
                replace(row, hf_names=tuple(new if name == old else name for name in row.hf_names)) for row in turn.rows
            ),
            buckets=tuple(
                replace(bucket, stretches=tuple(s._replace(name=new) if s.name == old else s for s in bucket.stretches))
                for bucket in turn.buckets
            ),
        )
        for turn in plan.turns
    ]
    sources = {new if name == old else name: held for name, held in plan.sources.items()}
    return replace(plan, turns=tuple(turns), sources=sources)


def exchanged(plan: TransferPlan) -> TransferPlan:
    """The plan for servers of two workers, in which each gets the parts of the other."""
    turns = [
        replace(
            turn,
            buckets=tuple(
                replace(bucket, group=bucket.group._replace(workers=tuple(sorted(1 - w for w in bucket.group.workers))))
                for bucket in turn.buckets
            ),
        )
        for turn in plan.turns
    ]
    return replace(plan, turns=tuple(turns))


def equal(first: Tensor, second: Tensor) -> bool:
    """The same dtype, shape and bits."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
