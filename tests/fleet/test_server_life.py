"""Start and end of server processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.server import start_server, stop_server, wait_until_healthy
from tests.fleet.server_parent import gone, session, started_by_a_rank
from tests.models import REPOSITORY


def test_server_dies_with_its_killed_parent(tiny_model: Path, tmp_path: Path) -> None:
    """Already while it starts. One that is healthy: tests/fleet/test_split_server.py."""
    with started_by_a_rank(tiny_model, tmp_path / "server.log", "starting") as started:
        assert session(started.leader)
        started.parent.kill()
        started.parent.wait()
        assert gone(started.leader, 15), session(started.leader)


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
