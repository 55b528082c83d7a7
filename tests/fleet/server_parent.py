"""A server that a rank of torchrun has started, and whether anything of it is left when that rank was killed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.models import REPOSITORY

# Starts a server as a rank of torchrun would, tells its process id and port, and waits to be killed.
PARENT = """
import sys, time
from pathlib import Path
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.server import start_server, wait_until_healthy

model, log, tensor, wait = sys.argv[1:]
fleet = FleetConfig(dtype="float32", kv_cache_gb=0.03, max_num_seqs=4, tensor=int(tensor))
server = start_server(
    model=model, index=0, port=None, fleet=fleet, max_model_len=128, seed=1, log_path=Path(log), token="secret"
)
if wait == "healthy":
    wait_until_healthy(server, 180)
print(server.process.pid, server.port, flush=True)
time.sleep(300)
"""
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def session(leader: int) -> list[psutil.Process]:
    """Living processes of the session that `leader` opened."""
    members = []
    for process in psutil.process_iter(["status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == leader:
                members.append(process)
        except ProcessLookupError:
            continue
    return members


def gone(leader: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while session(leader):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True)
class StartedServer:
    """`parent` started the server whose first process is `leader`; its token is "secret"."""

    parent: "subprocess.Popen[str]"
    leader: int
    port: int


@contextmanager
def started_by_a_rank(model: Path, log: Path, wait: str, tensor: int = 1) -> Iterator[StartedServer]:
    """A server of `tensor` workers, `starting` or `healthy`; nothing is left of it afterwards."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), str(log), str(tensor), wait],
        env=os.environ | TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    leader = 0
    try:
        assert parent.stdout is not None
        leader, port = map(int, parent.stdout.readline().split() or (0, 0))
        assert leader, log.read_text()[-3000:]
        yield StartedServer(parent, leader, port)
    finally:
        parent.kill()
        parent.wait()
        for process in session(leader) if leader else ():
            process.kill()
