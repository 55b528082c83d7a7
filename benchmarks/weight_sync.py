"""A weight push of SmolLM2-135M to two CPU vLLM servers, against a plain gloo broadcast of the same bytes.

Usage: python benchmarks/weight_sync.py [--rounds N] [--servers N] [--bucket-mb N]

Prints the medians of interleaved rounds, their ratio, and where the time of a push goes: of wall and of processors, the
second of which other work on the machine changes little.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from dapo_megatron.sync.pusher import PushReport  # noqa: E402
from tests.models import smollm2  # noqa: E402
from tests.pushing import Push, plan_of  # noqa: E402

T = TypeVar("T")

PLAIN_RECEIVER = """
import sys
from dapo_megatron.sync import group as transfer

port, rank, size, nbytes = map(int, sys.argv[1:])
store = transfer.join_store("127.0.0.1", port, 60)
group = transfer.TransferGroup(
    store, address="127.0.0.1", rank=rank, world_size=size, backend="gloo", timeout=60
)
buffer = transfer.byte_buffer(nbytes, "gloo")
while True:
    group.start_broadcast(buffer, 600)
    group.wait()
"""


class PlainBroadcast:
    """A broadcast of `nbytes` bytes to processes that do nothing else, into memory that they have already."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        store = transfer.open_store("127.0.0.1", 60)
        command = [sys.executable, "-c", PLAIN_RECEIVER, str(store.port)]
        size = str(receivers + 1)
        self._processes = [
            subprocess.Popen([*command, str(rank), size, str(nbytes)], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
            for rank in range(1, receivers + 1)
        ]
        self._group = transfer.TransferGroup(
            store, address="127.0.0.1", rank=0, world_size=receivers + 1, backend="gloo", timeout=60
        )
        self._buffer = torch.ones(nbytes, dtype=torch.uint8)

    def __call__(self) -> float:
        """Seconds that one broadcast takes."""
        begun = time.monotonic()
        self._group.start_broadcast(self._buffer, 60)
        self._group.wait()
        return time.monotonic() - begun

    @property
    def pids(self) -> list[int]:
        """The receivers'."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the receivers."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._group.close()


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
        push = Push(plan, [(server.url, token) for server in started], timeout=600)
        plain = PlainBroadcast(nbytes, options.servers)
        try:
            push.connect()
            measured = []
            for version in range(1, options.rounds + 2):
                alone = measure(plain, plain.pids)
                pushed = measure(partial(push, tensors.items(), version), [server.process.pid for server in started])
                measured.append(Round(*alone, *pushed))
        finally:
            push.close()
            plain.close()
    report(nbytes, options.servers, measured[1:])  # the first round also checks the servers' geometry


@dataclass(frozen=True)
class Processors:
    """Processor seconds of the sender and, all together, of the receivers."""

    sender: float
    receivers: float


@dataclass(frozen=True)
class Round:
    """A plain broadcast and a push."""

    plain: float
    plain_processors: Processors
    push: PushReport
    push_processors: Processors


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
    """Print medians and their ratio."""

    plain = median(one.plain for one in measured)
    pushed = median(one.push.seconds for one in measured)
    print(f"{nbytes / 1e6:.0f} MB to {count} servers, medians of {len(measured)} interleaved rounds")
    print("                        wall   sender  receivers (processor seconds)")
    for name, seconds, used in (
        ("plain gloo broadcast", plain, [one.plain_processors for one in measured]),
        ("weight push", pushed, [one.push_processors for one in measured]),
    ):
        print(
            f"{name:21} {seconds:6.3f} {median(p.sender for p in used):8.3f} {median(p.receivers for p in used):10.3f}"
        )
    print(f"{pushed / plain:.2f} times as long")
    for phase in measured[0].push.phases:
        print(f"  {phase:8} {median(one.push.phases[phase] for one in measured):6.3f} s")


if __name__ == "__main__":
    main()
