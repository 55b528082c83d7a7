"""The trainer's side of a weight push: one broadcast of every bucket to all workers of all servers."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.buckets import Bucket, TensorSpec, dtype_name, pack, tensor_hash
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError

POLL_SECONDS = 0.001
BLAME_SECONDS = 3.0

T = TypeVar("T")


@dataclass(frozen=True)
class PushReport:
    """What a push took: wall seconds, bytes sent to each worker, number of tensors."""

    seconds: float
    bytes: int
    tensors: int


class WeightSender:
    """Pushes weights to servers, each given as (base URL, token), from this process alone.

    `host` is this machine's address that the servers reach (loopback, or a private one); `bucket_bytes` is the size of
    the one buffer that exists at a time; `dtype` is what the servers hold and what travels, but for the tensors named
    in `exact`, which are fp32 everywhere; `timeout` in seconds is the deadline of connecting and of each push;
    `backend` is gloo or nccl. After an error the transfer group is gone: `connect` builds a new one.
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, str]],
        *,
        host: str,
        bucket_bytes: int,
        dtype: torch.dtype,
        timeout: float,
        backend: str,
        exact: Collection[str] = (),
    ) -> None:
        self._servers = [ServerAdmin(url, token, timeout) for url, token in servers]
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._exact = frozenset(exact)
        self._timeout = timeout
        self._backend = backend
        self._store = transfer.open_store(host, timeout)
        self._epoch = 0
        self._group: transfer.TransferGroup | None = None

    def connect(self) -> None:
        """Builds the transfer group with every worker of every server. Raises ServerError."""
        self._leave()
        self._epoch += 1
        deadline = time.monotonic() + self._timeout
        self._all(lambda admin: admin.abandon_weight_update(), deadline)
        sizes = self._all(lambda admin: admin.world_size(), deadline)
        offsets = list(accumulate(sizes, initial=1))
        world_size = offsets.pop()
        common = {
            "host": self._host,
            "port": self._store.port,
            "world_size": world_size,
            "backend": self._backend,
            "epoch": self._epoch,
            "timeout": self._timeout,
        }
        calls = [
            _in_background(admin.init_weight_transfer_engine, {**common, "rank_offset": offset})
            for admin, offset in zip(self._servers, offsets, strict=True)
        ]
        meeting = transfer.epoch_store(self._store, self._epoch)
        arrivals = [transfer.arrival_key(rank) for rank in range(1, world_size)]
        # Joining blocks until everybody is there, so it begins when nothing can fail any more.
        self._wait(lambda: meeting.check(arrivals), calls, deadline)
        self._group = transfer.TransferGroup(
            meeting,
            address=self._host,
            rank=transfer.SENDER,
            world_size=world_size,
            backend=self._backend,
            timeout=self._timeout,
        )
        self._results(calls, deadline)

    def push(
        self, tensors: Iterable[tuple[str, Tensor]], plan: Sequence[tuple[str, Sequence[int]]], version: int
    ) -> PushReport:
        """Makes `tensors` the weights of all servers, under `version`, and empties their prefix caches.

        `plan` lists name and shape of every tensor in the order in which `tensors` yields them, in Hugging Face
        names; they are read one at a time and cast to what travels. Raises ServerError, naming the server,
        if one fails, is late, or received other bytes than were sent; its weights are then not usable.
        """
        if self._group is None:
            raise RuntimeError("connect() comes before push()")
        begun = time.monotonic()
        deadline = begun + self._timeout
        buckets = pack(
            (TensorSpec(name, self._dtype_of(name), tuple(shape)) for name, shape in plan), self._bucket_bytes
        )
        try:
            self._all(lambda admin: admin.start_weight_update(), deadline)
            info = self._update_info(plan)
            calls = [_in_background(admin.update_weights, info) for admin in self._servers]
            digests = self._broadcast(self._group, iter(tensors), buckets, calls, deadline)
            self._results(calls, deadline)
            received = self._all(lambda admin: admin.weight_hashes(), deadline)
            for admin, workers in zip(self._servers, received, strict=True):
                compare_hashes(admin.url, digests, workers)
            self._all(lambda admin: admin.finish_weight_update(version), deadline)
            self._all(lambda admin: admin.reset_prefix_cache(), deadline)
        except BaseException:
            self._leave()
            raise
        return PushReport(time.monotonic() - begun, sum(bucket.nbytes for bucket in buckets), len(plan))

    def close(self) -> None:
        """Leaves the group and closes all connections."""
        self._leave()
        for admin in self._servers:
            admin.close()

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._exact else self._dtype

    def _update_info(self, plan: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        return {
            "names": [name for name, _ in plan],
            "dtype_names": [dtype_name(self._dtype_of(name)) for name, _ in plan],
            "shapes": [list(shape) for _, shape in plan],
            "bucket_bytes": self._bucket_bytes,
        }

    def _broadcast(
        self,
        group: transfer.TransferGroup,
        tensors: Iterator[tuple[str, Tensor]],
        buckets: Sequence[Bucket],
        calls: Sequence[Future[None]],
        deadline: float,
    ) -> dict[str, str]:
        """Sends bucket after bucket through one buffer; returns the SHA-256 of every tensor by name."""
        buffer = transfer.byte_buffer(max((bucket.nbytes for bucket in buckets), default=0), self._backend)
        digests: dict[str, str] = {}
        for bucket in buckets:
            views = bucket.views(buffer)
            for name, view in views:
                _fill(name, view, tensors)
            group.start_broadcast(buffer[: bucket.nbytes], max(deadline - time.monotonic(), POLL_SECONDS))
            # The hashes are taken while the bytes travel.
            digests.update((name, tensor_hash(view)) for name, view in views)
            self._wait(group.done, calls, deadline)
            try:
                group.wait()
            except RuntimeError as error:
                raise self._culprit(calls) from error
        if (extra := next(tensors, None)) is not None:
            raise ValueError(f"tensor {extra[0]} is not in the plan of the push")
        return digests

    def _all(self, request: Callable[[ServerAdmin], T], deadline: float) -> list[T]:
        """`request` to all servers at once; their answers, in the order of the servers."""
        return self._results([_in_background(request, admin) for admin in self._servers], deadline)

    def _culprit(self, calls: Sequence[Future[None]]) -> ServerError:
        """Who broke the broadcast: a server that is gone or stuck fails its HTTP call too, which has its name."""
        try:
            self._results(calls, time.monotonic() + BLAME_SECONDS)
        except ServerError as error:
            return error
        return ServerError("the broadcast of weights failed though every server received it")

    def _results(self, calls: Sequence[Future[T]], deadline: float) -> list[T]:
        """Results of all `calls`, one per server; the first failure is raised as soon as it happens."""
        self._wait(lambda: all(call.done() for call in calls), calls, deadline)
        return [call.result() for call in calls]

    def _wait(self, done: Callable[[], bool], calls: Sequence[Future[Any]], deadline: float) -> None:
        """Waits for `done`, but no longer than until a call fails or the deadline (monotonic seconds) passes."""
        while not done():
            for call in calls:
                if call.done():
                    call.result()
            if time.monotonic() > deadline:
                late = [admin.url for admin, call in zip(self._servers, calls, strict=True) if not call.done()]
                raise ServerError(f"servers {', '.join(late)} did not answer before the deadline (fleet.push_timeout)")
            time.sleep(POLL_SECONDS)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def compare_hashes(url: str, sent: dict[str, str], workers: Sequence[dict[str, str]]) -> None:
    """Raises ServerError naming the first tensor that some worker of server `url` did not receive as sent."""
    for rank, received in enumerate(workers):
        for name, digest in sent.items():
            if received.get(name) != digest:
                arrived = received.get(name)
                raise ServerError(
                    f"server {url}, worker {rank}: tensor {name} arrived with hash {arrived}, sent was {digest}"
                )


def _in_background(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Runs `call` in a thread that does not keep the process alive: a server may never answer."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="weight-push", daemon=True).start()
    return future


def _fill(name: str, view: Tensor, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copies the next tensor, which must be `name` with the shape of `view`, into `view`, casting it."""
    found, tensor = next(tensors, ("nothing", None))
    if tensor is None or found != name or tensor.shape != view.shape:
        shape = None if tensor is None else tuple(tensor.shape)
        raise ValueError(f"the push plan expects {name} {tuple(view.shape)}, the weights yielded {found} {shape}")
    view.copy_(tensor.detach())
