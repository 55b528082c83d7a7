"""A weight push of SmolLM2-135M to two CPU vLLM servers, against a plain gloo broadcast of the same bytes.

Usage: python benchmarks/weight_sync.py [--rounds N] [--servers N] [--bucket-mb N]

Prints the medians of interleaved rounds and their ratios: of a plain broadcast, of a push to processes that hash what
arrives and forget it (all that is ours of a push), and of one to vLLM, which loads it. Beside the wall time stands that
of processors, which other work on the machine changes little.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from dapo_megatron.config.fleet import FleetConfig  # noqa: E402
from dapo_megatron.rollout.server import Server, start_server, stop_server, wait_until_healthy  # noqa: E402
from dapo_megatron.sync import group as transfer  # noqa: E402
from dapo_megatron.sync.channel import Channel  # noqa: E402
from dapo_megatron.sync.plan import TransferPlan  # noqa: E402
from dapo_megatron.sync.pusher import PushReport  # noqa: E402
from dapo_megatron.sync.sender import Sender  # noqa: E402
from dapo_megatron.sync.wire import Group, encode  # noqa: E402
from tests.models import smollm2  # noqa: E402
from tests.pushing import Push, TensorSource, plan_of  # noqa: E402

HOST = "127.0.0.1"
TIMEOUT = 600  # seconds
T = TypeVar("T")

PLAIN_RECEIVER = """
import sys
from dapo_megatron.sync import group as transfer

port, rank, size, nbytes = map(int, sys.argv[1:])
store = transfer.join_store("127.0.0.1", port, 600)
group = transfer.TransferGroup(
    store, address="127.0.0.1", rank=rank, world_size=size, backend="gloo", timeout=600
)
buffer = transfer.byte_buffer(nbytes, "gloo")
while True:
    group.start_broadcast(buffer, 600)
    group.wait()
"""


HASHING_RECEIVER = """
import json, sys
from dapo_megatron.sync.inbox import Inbox

inbox = Inbox(0, **json.loads(sys.argv[1]))
while True:
    for stretches in inbox.receive():
        del stretches
    print(json.dumps(inbox.hashes), flush=True)
"""


class Receivers:
    """Processes that run `code`, each with its own `arguments`."""

    def __init__(self, code: str, arguments: Sequence[Sequence[str]]) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, *given], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for given in arguments
        ]

    @property
    def pids(self) -> list[int]:
        """Theirs."""
        return [process.pid for process in self.processes]

    def close(self) -> None:
        """Ends them."""
        for process in self.processes:
            process.kill()
            process.wait()


class PlainBroadcast(Receivers):
    """A broadcast of `nbytes` bytes to processes that do nothing else, into memory that they have already."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        store, size = transfer.open_store(HOST, TIMEOUT), receivers + 1
        super().__init__(
            PLAIN_RECEIVER, [[str(n) for n in (store.port, rank, size, nbytes)] for rank in range(1, size)]
        )
        self._group = transfer.TransferGroup(
            store, address=HOST, rank=transfer.SENDER, world_size=size, backend="gloo", timeout=TIMEOUT
        )
        self._buffer = torch.ones(nbytes, dtype=torch.uint8)

    def __call__(self) -> float:
        """Seconds that one broadcast takes."""
        begun = time.monotonic()
        self._group.start_broadcast(self._buffer, TIMEOUT)
        self._group.wait()
        return time.monotonic() - begun


class HashedPush(Receivers):
    """A push of `tensors` to processes that hash what arrives."""

    def __init__(self, plan: TransferPlan, tensors: dict[str, torch.Tensor], receivers: int) -> None:
        store = transfer.open_store(HOST, TIMEOUT)
        info = {"servers": receivers, "host": HOST, "port": store.port, "epoch": 1, "backend": "gloo"}
        info |= {"way": "broadcast", "timeout": TIMEOUT, **encode(plan.buckets)}
        super().__init__(HASHING_RECEIVER, [[json.dumps(info | {"server": number})] for number in range(receivers)])
        meeting = transfer.epoch_store(store, 1)
        meeting.wait([transfer.arrival_key(number, 0) for number in range(receivers)], timedelta(seconds=TIMEOUT))
        meeting.set(transfer.GO, "")
        self._groups: dict[Group, Channel] = {
            group: transfer.TransferGroup(
                transfer.group_store(meeting, number), address=HOST, rank=transfer.SENDER,
                world_size=transfer.group_size(receivers, group.workers), backend="gloo", timeout=TIMEOUT,
            )
            for number, group in enumerate(plan.groups)
        }  # fmt: skip
        self._sender = Sender(plan, TensorSource(tensors.items()), 0, "gloo")

    def __call__(self) -> float:
        """Seconds until all receivers have said what they got, and it is what was sent."""
        begun = time.monotonic()
        sent = self._sender.send(self._groups, lambda: None, lambda: None, begun + TIMEOUT)
        due = [number for bucket in sent.hashes for number in bucket]
        for process in self.processes:
            assert process.stdout is not None
            if sent.error or json.loads(process.stdout.readline()) != due:
                raise RuntimeError(f"other bytes arrived than were sent {sent.error}")
        return time.monotonic() - begun


@contextmanager
def servers(model: Path, count: int, logs: Path, token: str) -> Iterator[list[Server]]:
    """`count` healthy servers with the model in bf16."""
    fleet = FleetConfig(dtype="bfloat16", kv_cache_gb=0.03, max_num_seqs=4)
    with ExitStack() as stack:
        started = []
        for index in range(count):
            log = logs / f"server_{index}.log"
            server = start_server(
                model=str(model), index=index, port=None, fleet=fleet, max_model_len=128, seed=1, log_path=log,
                token=token,
            )  # fmt: skip
            stack.callback(stop_server, server)
            started.append(server)
        for server in started:
            wait_until_healthy(server, timeout=600)
        yield started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--bucket-mb", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, token = smollm2(), secrets.token_hex(8)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / "model.safetensors").items()}
    plan = plan_of(model, dtype="bfloat16", bucket_bytes=options.bucket_mb << 20)
    nbytes = sum(bucket.nbytes for bucket in plan.buckets)
    with tempfile.TemporaryDirectory() as logs, servers(model, options.servers, Path(logs), token) as started:
        push = Push(plan, [(server.url, token) for server in started], timeout=TIMEOUT)
        plain = PlainBroadcast(nbytes, options.servers)
        hashed = HashedPush(plan, tensors, options.servers)
        try:
            push.connect()
            measured = []
            for version in range(1, options.rounds + 2):
                alone = measure(plain, plain.pids)
                arrived = measure(hashed, hashed.pids)
                pushed = measure(partial(push, tensors.items(), version), [server.process.pid for server in started])
                measured.append(Round(alone, arrived, pushed))
        finally:
            push.close()
            plain.close()
            hashed.close()
    report(nbytes, options.servers, measured[1:])  # the first round also checks the servers' geometry


@dataclass(frozen=True)
class Processors:
    """Processor seconds of the sender and, all together, of the receivers."""

    sender: float
    receivers: float


@dataclass(frozen=True)
class Round:
    """What a plain broadcast, a push to processes that hash and one to vLLM took."""

    plain: tuple[float, Processors]
    hashed: tuple[float, Processors]
    pushed: tuple[PushReport, Processors]


def measure(function: Callable[[], T], receivers: Sequence[int]) -> tuple[T, Processors]:
    """The function's result, and the processor seconds that it took here and in processes `receivers`."""
    begun, others = time.process_time(), sum(map(processor_seconds, receivers))
    result = function()
    return result, Processors(time.process_time() - begun, sum(map(processor_seconds, receivers)) - others)


def processor_seconds(pid: int) -> float:
    """What a process and its children have used so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def report(nbytes: int, count: int, measured: list[Round]) -> None:
    """Print medians and their ratios."""
    rows = (
        ("plain gloo broadcast", [one.plain for one in measured]),
        ("push, hashed", [one.hashed for one in measured]),
        ("push, live in vLLM", [(one.pushed[0].seconds, one.pushed[1]) for one in measured]),
    )
    print(f"{nbytes / 1e6:.0f} MB to {count} receivers, medians of {len(measured)} interleaved rounds")
    print("                        wall          sender  receivers (processor seconds)")
    plain = median(seconds for seconds, _ in rows[0][1])
    for name, values in rows:
        wall = median(seconds for seconds, _ in values)
        sender, receivers = (median(getattr(used, who) for _, used in values) for who in ("sender", "receivers"))
        print(f"{name:21} {wall:6.3f} x {wall / plain:4.2f} {sender:8.3f} {receivers:10.3f}")
    print("of the last:")
    for phase in measured[0].pushed[0].phases:
        print(f"  {phase:8} {median(one.pushed[0].phases[phase] for one in measured):6.3f} s")


if __name__ == "__main__":
    main()
