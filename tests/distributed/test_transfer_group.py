"""The transfer group between processes, built where torchrun's environment would mislead torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.buckets import hashes
from tests.models import REPOSITORY

WORLD_SIZE = 3
NBYTES = 1 << 20
TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}

RECEIVER = """
import sys
from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.buckets import hashes

port, rank, world_size, nbytes, epochs = map(int, sys.argv[1:])
store = transfer.join_store("127.0.0.1", port, 120)
for epoch in range(1, epochs + 1):
    meeting = transfer.epoch_store(store, epoch)
    address = transfer.route_to("127.0.0.1", port)
    group = transfer.TransferGroup(
        meeting, address=address, rank=rank, world_size=world_size, backend="gloo", timeout=120
    )
    buffer = transfer.byte_buffer(nbytes, "gloo")
    print("joined", flush=True)
    try:
        group.start_broadcast(buffer, 120)
        group.wait()
        print(*hashes([buffer], 'gloo'), flush=True)
    except RuntimeError:
        print("broken off", flush=True)
    group.close()
"""


@contextmanager
def receivers(port: int, epochs: int) -> Iterator[list["subprocess.Popen[str]"]]:
    command = [sys.executable, "-c", RECEIVER, str(port)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE), str(NBYTES), str(epochs)],
            env=os.environ | TORCHRUN,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, WORLD_SIZE)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def join(store: torch.distributed.Store, epoch: int) -> transfer.TransferGroup:
    return transfer.TransferGroup(
        transfer.epoch_store(store, epoch),
        address="127.0.0.1",
        rank=transfer.SENDER,
        world_size=WORLD_SIZE,
        backend="gloo",
        timeout=120,
    )


@pytest.fixture(autouse=True)
def _torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_bytes_arrive_and_the_group_can_be_rebuilt() -> None:
    store = transfer.open_store("127.0.0.1", timeout=120)
    with receivers(store.port, epochs=2) as processes:
        for epoch in (1, 2):
            group = join(store, epoch)
            payload = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
            group.start_broadcast(payload, 120)
            group.wait()
            for process in processes:
                assert line(process) == "joined"
                assert line(process) == str(*hashes([payload], "gloo"))
            group.close()
        assert [process.wait(60) for process in processes] == [0, 0]


def test_sender_that_breaks_off_frees_its_receivers() -> None:
    store = transfer.open_store("127.0.0.1", timeout=120)
    with receivers(store.port, epochs=1) as processes:
        group = join(store, 1)
        for process in processes:
            assert line(process) == "joined"
        begun = time.monotonic()
        group.close()
        for process in processes:
            assert line(process) == "broken off"
        assert time.monotonic() - begun < 60


SENDER_THAT_GIVES_UP = """
from dapo_megatron.sync import group as transfer
store = transfer.open_store("127.0.0.1", 120)
print(store.port, flush=True)
group = transfer.TransferGroup(
    transfer.epoch_store(store, 1), address="127.0.0.1", rank=0, world_size=3, backend="gloo", timeout=120
)
input()
group.start_broadcast(transfer.byte_buffer(64 << 20, "gloo"), 120)
assert not group.done()
group.close()
"""


def test_sender_need_not_wait_for_a_broadcast_that_nobody_receives() -> None:
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER_THAT_GIVES_UP],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with receivers(int(line(sender)), epochs=1) as processes:
            for process in processes:
                assert line(process) == "joined"
                os.kill(process.pid, signal.SIGSTOP)
            begun = time.monotonic()
            sender.communicate("go on\n", timeout=60)
            assert sender.returncode == 0
            assert time.monotonic() - begun < 60
    finally:
        sender.kill()
        sender.wait()


def test_store_listens_on_its_host_alone() -> None:
    store = transfer.open_store("127.0.0.2", timeout=5)
    assert transfer.join_store("127.0.0.2", store.port, 5).num_keys() >= 0
    with pytest.raises(RuntimeError):
        transfer.join_store("127.0.0.1", store.port, 1)


def test_route_is_the_address_that_the_host_sees() -> None:
    assert transfer.route_to("127.0.0.1", 9) == "127.0.0.1"
