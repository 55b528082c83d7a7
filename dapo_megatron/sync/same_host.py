"""Buckets from a trainer rank to the worker on its own GPU, through memory that both processes see.

On GPUs that is CUDA IPC: two processes on one GPU cannot be in one NCCL group. With gloo it is anonymous shared memory
of the kernel. Handles travel as JSON values. Only torch and the standard library: servers import it, too.
"""

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from dapo_megatron.sync.group import byte_buffer

POLL_SECONDS = 0.001
_HANDLE, _CLOSED, _TAKEN = "handle", "closed", "taken"


def meeting_place(store: Store, sender: int) -> PrefixStore:
    """The part of an incarnation's store where trainer rank `sender` and its worker meet."""
    return PrefixStore(f"same_host/{sender}", store)


class SharedSender:
    """A channel to one worker. One bucket is in the shared buffer at a time."""

    def __init__(self, store: Store, nbytes: int, backend: str) -> None:
        self._store, self._backend = store, backend
        self._memory: _Memory | None = _Memory(nbytes, backend)
        self._sent = 0
        self._until: float | None = None  # monotonic seconds; None: nothing is under way
        store.set(_HANDLE, json.dumps(self._memory.handle))

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """Puts `buffer` into the shared memory once it is free; the worker has `timeout` seconds to take it."""
        self.wait()
        if self._memory is None:
            raise RuntimeError("the channel is closed")
        self._memory.buffer[: buffer.numel()].copy_(buffer)
        settle(self._backend)
        self._sent += 1
        self._store.set(str(self._sent), "")
        self._until = time.monotonic() + timeout
        return buffer.nbytes

    def done(self) -> bool:
        """Whether the worker has taken what was sent, or is gone or late."""
        return self._until is None or self._taken() or self._lost() or time.monotonic() > self._until

    def wait(self) -> None:
        """Waits until the worker has taken what was sent. RuntimeError if it is gone or late."""
        if self._until is None:
            return
        while not self.done():
            time.sleep(POLL_SECONDS)
        self._until = None
        if not self._taken():
            raise RuntimeError("the worker left the channel" if self._lost() else "the worker took too long")
        self._store.delete_key(_TAKEN)

    def close(self) -> None:
        """Leaves the channel; the worker gets an error where it waits."""
        if self._memory is not None:
            self._memory = self._until = None
            _tell_closed(self._store)

    def _taken(self) -> bool:
        return bool(self._store.check([_TAKEN]))

    def _lost(self) -> bool:
        return bool(self._store.check([_CLOSED]))


class SharedReceiver:
    """The worker's end."""

    def __init__(self, store: Store, backend: str, timeout: float) -> None:
        store.wait([_HANDLE], timedelta(seconds=timeout))
        self._store, self._backend = store, backend
        self._memory: Tensor | None = open_memory(json.loads(store.get(_HANDLE)), backend)
        self._received = 0
        self._begun: tuple[Tensor, float] | None = None

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """Expects the next bucket, for `buffer`, within `timeout` seconds."""
        self._begun = buffer, time.monotonic() + timeout
        return buffer.nbytes

    def done(self) -> bool:
        """Whether nothing is expected that `wait` has not waited for."""
        return self._begun is None

    def wait(self) -> None:
        """Waits for the bucket and copies it, so that the sender may go on. RuntimeError if it is gone or late."""
        if self._begun is None:
            return
        (buffer, until), self._begun = self._begun, None
        self._received += 1
        key = str(self._received)
        while not self._store.check([key]):
            if self._memory is None or self._store.check([_CLOSED]):
                raise RuntimeError("the sender left the channel")
            if time.monotonic() > until:
                raise RuntimeError("the sender took too long")
            time.sleep(POLL_SECONDS)
        if self._memory is None:
            raise RuntimeError("the channel is closed")
        self._store.delete_key(key)
        buffer.copy_(self._memory[: buffer.numel()])
        settle(self._backend)
        self._store.set(_TAKEN, "")

    def close(self) -> None:
        """Leaves the channel; the sender gets an error where it waits."""
        if self._memory is not None:
            self._memory = None
            _tell_closed(self._store)


def _tell_closed(store: Store) -> None:
    with suppress(RuntimeError):  # rank 0, where the store is, may have ended before
        store.set(_CLOSED, "")


class _Memory:
    """A uint8 buffer that another process of this machine can open by `handle`, as long as this object lives."""

    def __init__(self, nbytes: int, backend: str) -> None:
        self.buffer: Tensor
        self.handle: dict[str, Any]
        self._file: int | None = None
        if backend == "nccl":
            self.buffer = byte_buffer(nbytes, backend)
            device, *shared = self.buffer.untyped_storage()._share_cuda_()
            values = [value.hex() if isinstance(value, bytes) else value for value in shared]
            self.handle = {"shared": values, "gpu": _gpu(device), "nbytes": nbytes}
        else:
            # The kernel keeps it as long as somebody has it open: nothing is left when processes are killed.
            self._file = os.memfd_create("dapo-weights")
            os.ftruncate(self._file, nbytes)
            self.handle = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "nbytes": nbytes}
            self.buffer = open_memory(self.handle, backend)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def open_memory(handle: dict[str, Any], backend: str) -> Tensor:
    """The buffer that another process shares, uint8 [nbytes], without a copy.

    Raises:
        RuntimeError: if it cannot be reached from here.
    """
    nbytes = handle["nbytes"]
    if backend != "nccl":
        return torch.from_file(handle["path"], shared=True, size=nbytes, dtype=torch.uint8)
    device = torch.cuda.current_device()
    if (own := _gpu(device)) != handle["gpu"]:
        raise RuntimeError(f"this worker is on GPU {own}, the trainer rank that feeds it on {handle['gpu']}")
    shared = [bytes.fromhex(value) if isinstance(value, str) else value for value in handle["shared"]]
    storage = torch.UntypedStorage._new_shared_cuda(device, *shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:nbytes]


def settle(backend: str) -> None:
    """Waits until copies on the GPU are done; on a CPU they are."""
    if backend == "nccl":
        torch.cuda.current_stream().synchronize()


def _gpu(device: int) -> str:
    """What tells one GPU from another, whatever their numbers are in a process."""
    return str(torch.cuda.get_device_properties(device).uuid)
