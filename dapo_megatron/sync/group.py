"""A process group that weights travel on: its rank 0 sends, workers of all servers receive.

It is built without torch.distributed's default group, which belongs to the trainer ranks alone, and
without its rendezvous, which under torchrun would turn rank 0 into a client of the agent's store.
"""

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work

SENDER = 0

# What a worker says when a broadcast ended without its bytes: another member of the group is to blame.
BROKEN_OFF = "the broadcast of weights broke off"

# Keys of an incarnation's store: all workers are there and groups are built; somebody has given up.
GO, BROKEN = "go", "broken"

# Where a backend wants its buffers.
BUFFER_DEVICE = {"gloo": "cpu", "nccl": "cuda"}


def open_store(host: str, timeout: float) -> TCPStore:
    """The store that a transfer group meets at, listening on a free port of `host` alone.

    `timeout` in seconds bounds every later wait on it. The port is `store.port`.
    """
    # TCPStore would listen on all interfaces if it opened the socket itself.
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """Connects to the sender's store within `timeout` seconds."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def epoch_store(store: Store, epoch: int) -> PrefixStore:
    """The part of `store` that one incarnation of the groups uses: keys of an older one never match."""
    return PrefixStore(f"weights/{epoch}", store)


def group_store(meeting: Store, number: int) -> PrefixStore:
    """The part of an incarnation's store where the members of group `number` meet."""
    return PrefixStore(f"group/{number}", meeting)


def arrival_key(server: int, worker: int) -> str:
    """Key that a worker sets before it waits for the others, so that the senders know it is there."""
    return f"arrived/{server}/{worker}"


def receiver_rank(server: int, workers: Sequence[int], worker: int) -> int:
    """Rank of a worker in the group of its sender and the `workers` of every server."""
    return 1 + server * len(workers) + workers.index(worker)


def group_size(servers: int, workers: Sequence[int]) -> int:
    """Members of the group of a sender and the `workers` of every server."""
    return 1 + servers * len(workers)


def route_to(host: str, port: int) -> str:
    """This machine's address on the way to `host`; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class TransferGroup:
    """One incarnation of the group, and the broadcasts that are under way on it.

    It owns both alone: gloo closes its connections, which is what frees peers that wait for this process, when
    the last reference is gone, and an exception's traceback would keep any other.
    """

    def __init__(self, store: Store, *, address: str, rank: int, world_size: int, backend: str, timeout: float) -> None:
        """Joins the `world_size` ranks that meet at `store`; blocks until all are there.

        `backend` is gloo or nccl. `address` is the local address that peers reach this process at (gloo would
        otherwise ask the resolver for the host name). `timeout` in seconds bounds this call.
        """
        limit = timedelta(seconds=timeout)
        if backend == "gloo":
            kind = ProcessGroup.BackendType.GLOO
            transport = _gloo(store, address, rank, world_size, limit)
        else:
            kind = ProcessGroup.BackendType.NCCL
            transport = _nccl(store, rank, world_size, limit)
        self._group: ProcessGroup | None = ProcessGroup(store, rank, world_size)
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device(BUFFER_DEVICE[backend]), kind, transport)
        self._works: list[Work] = []

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """Begins to send `buffer` (rank 0) or to receive into it (others), and returns its bytes.

        Broadcasts follow each other; each fails after `timeout` seconds.
        """
        if self._group is None:
            raise RuntimeError("the transfer group is closed")
        self._works.append(self._group.broadcast(buffer, SENDER, timedelta(seconds=timeout)))
        return buffer.nbytes

    def done(self) -> bool:
        """Whether all broadcasts have ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Waits for the broadcasts; RuntimeError if a peer is gone or it took too long."""
        while self._works:
            self._works.pop(0).wait()

    def close(self) -> None:
        """Leaves the group. Peers that wait for this process get an error."""
        if self._group is None:
            return
        self._group.abort()  # NCCL ends a broadcast under way; gloo ignores this
        if not self.done():
            # Dropping a gloo group blocks until a broadcast under way has failed; nobody here waits for that.
            held = [*self._works, self._group]
            threading.Thread(target=_drop_when_done, args=(held,), name="transfer-group-close", daemon=True).start()
        self._works, self._group = [], None


def _drop_when_done(held: list[Any]) -> None:
    """Releases broadcasts and their group, `held`, once the broadcasts have ended.

    A process that exits earlier never releases them, which is what an exit needs: gloo's threads are still busy.
    """
    while not all(work.is_completed() for work in held[:-1]):
        time.sleep(0.1)
    held.clear()


def _gloo(store: Store, address: str, rank: int, world_size: int, timeout: timedelta) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub names it Options
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Backend:
    # Not every torch is built with NCCL.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, world_size, options)


def byte_buffer(nbytes: int, backend: str) -> Tensor:
    """An uninitialised uint8 tensor [nbytes] where `backend` can send and receive it."""
    return _ALLOCATE[backend](nbytes)


def _host_buffer(nbytes: int) -> Tensor:
    # NumPy asks for huge pages, torch does not: new memory would cost as much as what travels into it.
    return torch.from_numpy(np.empty(nbytes, np.uint8))


def _device_buffer(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=BUFFER_DEVICE["nccl"])


_ALLOCATE = {"gloo": _host_buffer, "nccl": _device_buffer}
