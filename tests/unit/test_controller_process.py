"""The controller as a process: how it starts, fails and ends. No server gets as far as starting here."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.config_helpers import write_config, write_model

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, open_rollouts, start_controller

PARENT = """
import sys, time
from dapo_megatron.config.load import load_config
from dapo_megatron.rollout.handle import start_controller
print(start_controller(load_config(sys.argv[1]), None).process.pid, flush=True)
time.sleep(60)
"""

IMPORTS = """
import resource, sys
import dapo_megatron.rollout.controller, dapo_megatron.rollout.handle, dapo_megatron.data.prompts
print({"torch", "vllm", "datasets"} & set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def quiet(done: float, total: float, text: str) -> None:
    pass


@pytest.fixture
def config_path(tmp_path: Path) -> Iterator[Path]:
    """A run whose server's port is taken, so that its controller fails right after it is up."""
    write_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield write_config(tmp_path, fleet={"port": taken.getsockname()[1]})


@pytest.fixture
def config(config_path: Path) -> Config:
    return load_config(config_path)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_it_loads_no_torch_and_stays_small() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    loaded, megabytes = result.stdout.rsplit(" ", 1)
    assert loaded == "set()"
    assert int(megabytes) < 150


def test_what_the_user_can_correct_is_told_in_one_sentence(config: Config) -> None:
    with open_rollouts(config, 0, lambda start: start()) as rollouts:
        with pytest.raises(UserError, match=rf"port {config.fleet.port} of 127\.0\.0\.1 cannot be used"):
            rollouts.wait_ready(quiet)
        assert isinstance(rollouts, RemoteRollouts)
        assert rollouts._process is not None
        process = rollouts._process.process
        assert process.poll() is None  # it stays to tell every rank
    assert process.poll() == 0


def test_a_killed_controller_is_noticed_at_once(config: Config) -> None:
    controller = start_controller(config, None)
    with RemoteRollouts(controller.address, controller) as rollouts:
        controller.process.kill()
        controller.process.wait(10)
        with pytest.raises(ControllerError, match=r"cannot be reached.*controller\.log"):
            rollouts.wait(1, quiet)


def test_a_controller_that_cannot_start_shows_its_log(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "model_dump_json", lambda self, **_: "{}")
    with pytest.raises(ControllerError, match=r"(?s)ended with code 1 while starting.*Field required"):
        start_controller(config, None)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(config_path: Path, end: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(config_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        controller = int(parent.stdout.readline())
        assert is_alive(controller)
        parent.send_signal(end)
        parent.wait(10)
        assert gone_within(controller, 10)
    finally:
        parent.kill()
        parent.wait()


def test_it_ends_on_sigterm(config: Config) -> None:
    controller = start_controller(config, None)
    os.kill(controller.process.pid, signal.SIGTERM)
    assert controller.process.wait(10) == 0


def test_an_error_on_another_rank_ends_the_controller_that_was_started(config: Config, tmp_path: Path) -> None:
    pids: list[int] = []

    def fails_elsewhere(start: object) -> object:
        assert callable(start)
        start()
        pids.extend(
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and str(tmp_path).encode() in (path / "cmdline").read_bytes()
        )
        raise UserError("rank 1 failed")

    with pytest.raises(UserError, match="rank 1 failed"):
        open_rollouts(config, 0, fails_elsewhere)  # type: ignore[arg-type]
    assert len(pids) == 1
    assert gone_within(pids[0], 1)
