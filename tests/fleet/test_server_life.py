"""Start and end of server processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.rollout.server import start_server, stop_server, wait_until_healthy
from dapo_megatron.sync.server_admin import ServerError
from tests.fleet.conftest import START_SECONDS
from tests.fleet.tiny import load, weights
from tests.models import REPOSITORY
from tests.pushing import Push, TensorSource, plan_of

# Starts a server as a rank of torchrun would, tells its process id, and waits to be killed.
PARENT = """
import sys, time
from pathlib import Path
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.server import start_server, wait_until_healthy

model, log, wait = sys.argv[1:]
fleet = FleetConfig(dtype="float32", kv_cache_gb=0.03, max_num_seqs=4)
server = start_server(
    model=model, index=0, port=None, fleet=fleet, max_model_len=128, seed=1, log_path=Path(log), token="secret"
)
if wait == "healthy":
    wait_until_healthy(server, 180)
print(server.process.pid, flush=True)
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


@pytest.mark.parametrize("wait", ["starting", "healthy"])
def test_server_dies_with_its_killed_parent(tiny_model: Path, tmp_path: Path, wait: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_model), str(tmp_path / "server.log"), wait],
        env=os.environ | TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    leader = 0
    try:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline() or 0)
        assert leader, (tmp_path / "server.log").read_text()[-3000:]
        assert session(leader)
        parent.kill()
        parent.wait()
        assert gone(leader, 15), session(leader)
    finally:
        parent.kill()
        parent.wait()
        for process in session(leader):
            process.kill()


def test_server_killed_during_a_push_is_named_at_once(
    tiny_model: Path, tiny_fleet: FleetConfig, tmp_path: Path
) -> None:
    server = start_server(
        model=str(tiny_model),
        index=0,
        port=None,
        fleet=tiny_fleet,
        max_model_len=128,
        seed=1,
        log_path=tmp_path / "server.log",
        token="secret",
    )
    push = None
    try:
        wait_until_healthy(server, START_SECONDS)
        plan = plan_of(tiny_model)
        push = Push(plan, [(server.url, "secret")], timeout=60)
        push.connect()
        tensors = weights(load(tiny_model))
        killed_at = 0.0

        class Lethal(TensorSource):
            def gather(self, row: Parameter) -> list[Tensor]:
                nonlocal killed_at
                if row is plan.turns[len(plan.turns) // 2].rows[0]:
                    killed_at = time.monotonic()
                    for process in session(server.process.pid):
                        process.kill()
                return super().gather(row)

        push.pusher._sender._source = Lethal(tensors)
        with pytest.raises(ServerError, match=f"server {server.url}: POST /update_weights failed") as caught:
            push.pusher.push(1)
        assert caught.value.url == server.url
        assert time.monotonic() - killed_at < 10
    finally:
        if push is not None:
            push.close()
        stop_server(server)


def test_server_without_its_parent_does_not_start(tmp_path: Path) -> None:
    """The parent may die between fork and the moment when the server asks for its death signal."""
    died_long_ago = subprocess.Popen([sys.executable, "-c", ""])
    died_long_ago.wait()
    begun = time.monotonic()
    code = subprocess.run(
        [sys.executable, "-m", "dapo_megatron.rollout.server", "--help"],
        env=os.environ | {"DAPO_SERVER_PARENT": str(died_long_ago.pid), "DAPO_SERVER_TOKEN": "secret"},
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=60,
        check=False,
    ).returncode
    assert code == -signal.SIGTERM
    assert time.monotonic() - begun < 20


def test_failing_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    server = start_server(
        model=str(tmp_path / "no_such_model"),
        index=3,
        port=None,
        fleet=FleetConfig(kv_cache_gb=0.03),
        max_model_len=128,
        seed=1,
        log_path=tmp_path / "logs" / "server_3.log",
        token="secret",
    )
    seen: list[tuple[float, str]] = []
    try:
        with pytest.raises(UserError) as failure:
            wait_until_healthy(server, 120, lambda seconds, line: seen.append((seconds, line)))
    finally:
        stop_server(server)
    text = str(failure.value)
    assert text.startswith("vLLM server 3 ended with code 1 while starting; the end of ")
    assert "no_such_model" in text
    assert len(text.splitlines()) <= 16
    assert seen


def test_slow_start_ends_at_its_timeout_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    server = start_server(
        model=str(tiny_model),
        index=0,
        port=None,
        fleet=FleetConfig(kv_cache_gb=0.03),
        max_model_len=128,
        seed=1,
        log_path=tmp_path / "server.log",
        token="secret",
    )
    try:
        with pytest.raises(UserError, match=r"was not ready after 1 s \(fleet.start_timeout\)"):
            wait_until_healthy(server, 1)
    finally:
        begun = time.monotonic()
        stop_server(server)
    assert time.monotonic() - begun < 12
    assert gone(server.process.pid, 1)
