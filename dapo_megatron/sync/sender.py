"""One trainer rank's part of a push: it gathers rows with the ranks that hold them, and broadcasts their buckets."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dapo_megatron.models.parameters import Parameter
from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.buckets import hashes, views
from dapo_megatron.sync.channel import Channel
from dapo_megatron.sync.plan import TransferPlan, Turn
from dapo_megatron.sync.server_admin import ServerError
from dapo_megatron.sync.wire import Bucket, Group, Stretch, aligned

POLL_SECONDS = 0.001


class WeightSource(Protocol):
    """The weights of this rank's part of the model."""

    def gather(self, row: Parameter) -> list[Tensor] | None:
        """The row's whole Hugging Face tensors on the rank that sends it, None elsewhere.

        A collective over the ranks that hold the row's shards, which call it in the same order.
        """


@dataclass
class Sent:
    """What a rank did in a push.

    Attributes:
        hashes: of the stretches of each bucket that it sent, in the order of the plan.
        bytes: that travelled.
        seconds: by phase: gather, pack (cast and copy), hash, wait (for receivers).
        error: why it broke off; empty: it sent everything.
    """

    hashes: list[list[int]] = field(default_factory=list)
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    error: str = ""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time within to a phase."""
        begun = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begun


class Sender:
    """Sends the turns of trainer rank `rank`; two turns' bytes exist at a time, one of them on its way."""

    def __init__(self, plan: TransferPlan, source: WeightSource, rank: int, backend: str) -> None:
        self._source, self._rank, self._backend = source, rank, backend
        self._turns = [(turn, rows) for turn in plan.turns if (rows := plan.shared_rows(rank, turn))]
        self._own = [turn for turn, _ in self._turns if turn.sender == rank]

    def send(
        self,
        groups: Mapping[Group, Channel],
        watch: Callable[[], None],
        give_up: Callable[[], None],
        deadline: float,
    ) -> Sent:
        """Gathers all turns of this rank, and broadcasts its own.

        After a failure it goes on gathering, so that the ranks it gathers with do not wait for it.

        Args:
            groups: the transfer groups that this rank leads.
            watch: called while it waits; raises ServerError if others have failed.
            give_up: called at once when this rank's part has failed.
            deadline: in monotonic seconds.
        """
        sent = Sent()
        size = max(map(_turn_bytes, self._own), default=0)
        arena, other = (transfer.byte_buffer(size, self._backend) for _ in range(2))
        under_way: list[Channel] = []
        for turn, rows in self._turns:
            if turn.sender != self._rank or sent.error:
                for row in rows:
                    self._source.gather(row)
                continue
            buffers = self._fill(turn, arena, sent)
            arena, other = other, arena
            try:
                _wait(under_way, watch, deadline, sent)
                under_way = _start(buffers, groups, deadline, sent)
                with sent.timed("hash"):
                    sent.hashes += [
                        hashes([view for _, view in views(bucket, flat)], self._backend) for bucket, flat in buffers
                    ]
                if turn is self._own[-1]:
                    _wait(under_way, watch, deadline, sent)
            except ServerError as error:
                sent.error = str(error)
                give_up()
        return sent

    def _fill(self, turn: Turn, arena: Tensor, sent: Sent) -> list[tuple[Bucket, Tensor]]:
        """The turn's buckets, cast to what travels, in stretches of `arena`."""
        buffers, end = [], 0
        targets: dict[str, list[tuple[Stretch, Tensor]]] = defaultdict(list)
        for bucket in turn.buckets:
            flat = arena[end : end + bucket.nbytes]
            end = aligned(end + bucket.nbytes)
            buffers.append((bucket, flat))
            for stretch, view in views(bucket, flat):
                targets[stretch.name].append((stretch, view))
        for row in turn.rows:
            with sent.timed("gather"):
                tensors = self._source.gather(row)
            assert tensors is not None, f"rank {self._rank} sends {row.name} but did not get it"
            with sent.timed("pack"):
                for name, tensor in zip(row.hf_names, tensors, strict=True):
                    for stretch, view in targets[name]:
                        _copy(tensor, stretch, view)
        return buffers


def _copy(tensor: Tensor, stretch: Stretch, view: Tensor) -> None:
    if tuple(tensor.shape) != stretch.shape:
        raise ValueError(f"the plan expects {stretch.name} {stretch.shape}, the model has {tuple(tensor.shape)}")
    view.copy_(tensor.detach().narrow(stretch.dim, stretch.start, stretch.stop - stretch.start))


def _turn_bytes(turn: Turn) -> int:
    return sum(aligned(bucket.nbytes) for bucket in turn.buckets)


def _start(
    buffers: list[tuple[Bucket, Tensor]], groups: Mapping[Group, Channel], deadline: float, sent: Sent
) -> list[Channel]:
    """Begins the broadcasts of a turn, each in a group of its own."""
    started = []
    for bucket, flat in buffers:
        group = groups[bucket.group]
        try:
            with sent.timed("pack"):
                sent.bytes += group.start_broadcast(flat, max(deadline - time.monotonic(), POLL_SECONDS))
        except RuntimeError as error:
            raise ServerError(f"{transfer.BROKEN_OFF}: {error}") from error
        started.append(group)
    return started


def _wait(under_way: list[Channel], watch: Callable[[], None], deadline: float, sent: Sent) -> None:
    """Waits for broadcasts. Raises ServerError if one fails or is late, or others have failed."""
    with sent.timed("wait"):
        watch()
        for group in under_way:
            while not group.done():
                watch()
                if time.monotonic() > deadline:
                    raise ServerError("servers did not receive weights before the deadline (fleet.push_timeout)")
                time.sleep(POLL_SECONDS)
            try:
                group.wait()
            except RuntimeError as error:
                raise ServerError(f"{transfer.BROKEN_OFF}: {error}") from error
