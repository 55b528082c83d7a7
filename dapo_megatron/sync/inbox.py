"""A worker's end of the transfer groups: the buckets of a push as they arrive. Torch alone, no vLLM."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.buckets import fill_nan, hashes, views
from dapo_megatron.sync.channel import Channel, Way
from dapo_megatron.sync.delta import DeltaReceiver
from dapo_megatron.sync.same_host import SharedReceiver, meeting_place
from dapo_megatron.sync.wire import Group, Stretch, decode

POLL_SECONDS = 0.01


class Inbox:
    """Joins the groups of one incarnation; blocks until everybody has.

    Args:
        worker: number of this worker in its server.
        server: number of its server, of `servers`.
        host, port: where the store of rank 0 listens.
        epoch: number of the incarnation.
        groups, buckets: what travels, as `wire.encode` gives it.
        backend: gloo or nccl.
        way: how buckets travel.
        timeout: seconds; the deadline of joining and of each broadcast.

    Attributes:
        hashes: of the last push's stretches, in their order.
        seconds: of the last push, by phase: receive, verify (hash), load (what the caller does between buckets).
    """

    def __init__(
        self,
        worker: int,
        *,
        server: int,
        servers: int,
        host: str,
        port: int,
        epoch: int,
        groups: list[Any],
        buckets: list[Any],
        backend: str,
        way: Way,
        timeout: float,
    ) -> None:
        self.hashes: list[int] = []
        self.seconds: dict[str, float] = {}
        self._backend, self._timeout = backend, timeout
        self._groups: dict[Group, Channel] = {}
        members, everything = decode(groups, buckets)
        self._buckets = [bucket for bucket in everything if worker in bucket.group.workers]
        store = transfer.join_store(host, port, timeout)
        meeting = transfer.epoch_store(store, epoch)
        meeting.set(transfer.arrival_key(server, worker), "")
        self._await_all(meeting)
        try:
            self._join(members, meeting, worker, server, servers, transfer.route_to(host, port), way)
        except RuntimeError as error:  # all were there before it began: somebody has left since
            raise RuntimeError(f"{transfer.BROKEN_OFF} before it began: {error}") from error

    def _await_all(self, meeting: Store) -> None:
        """Wait until the workers of all servers are there: building a group cannot be broken off any more.

        Raises:
            RuntimeError: if somebody has given up, or not all have come in time.
        """
        deadline = time.monotonic() + self._timeout
        while not meeting.check([transfer.GO]):
            if meeting.check([transfer.BROKEN]):
                raise RuntimeError(f"{transfer.BROKEN_OFF} before it began: somebody gave up")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{transfer.BROKEN_OFF} before it began: not all workers have come")
            time.sleep(POLL_SECONDS)

    def _join(
        self, members: list[Group], meeting: Store, worker: int, server: int, servers: int, address: str, way: Way
    ) -> None:
        for number, group in enumerate(members):
            if worker not in group.workers:
                continue
            if way == "same_host":
                self._groups[group] = SharedReceiver(meeting_place(meeting, group.sender), self._backend, self._timeout)
                continue
            channel = transfer.TransferGroup(
                transfer.group_store(meeting, number),
                address=address,
                rank=transfer.receiver_rank(server, group.workers, worker),
                world_size=transfer.group_size(servers, group.workers),
                backend=self._backend,
                timeout=self._timeout,
            )
            own = [bucket for bucket in self._buckets if bucket.group == group]
            self._groups[group] = DeltaReceiver(channel, own) if way == "delta" else channel

    @property
    def names(self) -> set[str]:
        """Names of the tensors that this worker gets, whole or in part."""
        return {stretch.name for bucket in self._buckets for stretch in bucket.stretches}

    def receive(self) -> Iterator[list[tuple[Stretch, Tensor]]]:
        """The buckets of a push, stretch by stretch, hashed, while the next one travels.

        No buffer is used twice: the caller may keep the tensors.

        Raises:
            RuntimeError: if a broadcast fails or is late.
        """
        self.hashes, self.seconds = [], dict.fromkeys(("receive", "verify", "load"), 0.0)
        following = self._start(0)
        for number, bucket in enumerate(self._buckets):
            buffer = following
            with self._timed("receive"):
                try:
                    self._groups[bucket.group].wait()
                except RuntimeError as error:
                    raise RuntimeError(f"{transfer.BROKEN_OFF}: {error}") from error
            following = self._start(number + 1)
            assert buffer is not None
            stretches = views(bucket, buffer)
            with self._timed("verify"):
                self.hashes += hashes([view for _, view in stretches], self._backend)
            with self._timed("load"):
                yield stretches

    def close(self) -> None:
        """Leaves the groups."""
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _start(self, number: int) -> Tensor | None:
        """Begins to receive bucket `number`, if there is one."""
        if number >= len(self._buckets):
            return None
        bucket = self._buckets[number]
        buffer = transfer.byte_buffer(bucket.nbytes, self._backend)
        self._groups[bucket.group].start_broadcast(buffer, self._timeout)
        return buffer

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begun


def whole_tensor(stretch: Stretch, view: Tensor, *, watched: bool) -> Tensor:
    """The stretch within a tensor of the whole shape, the rest of which nobody must read.

    `watched`: the rest is filled with what is no number, so that it shows if somebody does.
    """
    if stretch.whole:
        return view
    whole = view.new_empty(stretch.shape)
    if watched:
        fill_nan(whole)
    whole.narrow(stretch.dim, stretch.start, stretch.stop - stretch.start).copy_(view)
    return whole
