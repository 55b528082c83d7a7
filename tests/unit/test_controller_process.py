"""The controller as a process: how it starts, fails and ends. No server gets as far as starting here."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import handle
from dapo_megatron.rollout.address import Address, controller_host
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, open_rollouts, start_controller
from dapo_megatron.rollout.jobs import Admission
from tests.processes import descendants, gone_within, is_alive
from tests.unit.config_helpers import write_config, write_model

PARENT = """
import sys, time
from dapo_megatron.config.load import load_config
from dapo_megatron.rollout.handle import start_controller
print(start_controller(load_config(sys.argv[1]), None).process.pid, flush=True)
time.sleep(60)
"""

IMPORTS = """
import re, sys
from pathlib import Path
import dapo_megatron.rollout.controller, dapo_megatron.rollout.handle, dapo_megatron.data.prompts
heavy = {"torch", "vllm", "datasets"} & set(sys.modules)
print(heavy, re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def quiet(done: float, total: float, text: str) -> None:
    pass


def nobody(admission: Admission) -> None:
    raise AssertionError(f"{admission} was not expected")


@pytest.fixture
def config_path(tmp_path: Path) -> Iterator[Path]:
    """A run whose server's port is taken, so that its controller fails right after it is up."""
    write_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield write_config(tmp_path, fleet={"port": taken.getsockname()[1]})


@pytest.fixture
def config(config_path: Path) -> Config:
    return load_config(config_path)


def test_it_loads_no_torch_and_stays_small() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    loaded, kibibytes = result.stdout.rsplit(" ", 1)
    assert loaded == "set()"
    assert int(kibibytes) < 150 * 1024


def test_what_the_user_can_correct_is_told_in_one_sentence(config: Config) -> None:
    with open_rollouts(config, 0, lambda start: start()) as rollouts:
        with pytest.raises(UserError, match=rf"port {config.fleet.port} of 127\.0\.0\.1 cannot be used"):
            rollouts.wait_ready(quiet)
        assert isinstance(rollouts, RemoteRollouts)
        assert rollouts._process is not None
        process = rollouts._process.process
        assert process.poll() is None  # it stays to tell every rank
    assert process.poll() == 0


def test_a_reward_function_that_cannot_be_imported_ends_the_run_before_its_servers_start(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "rewards.py").write_text("import no_such_module_at_all\ndef reward(answer): ...")
    target = f"data.reward_function='{tmp_path}/rewards.py:reward'"
    config = load_config(write_config(tmp_path), [target])
    told = r"rewards\.py failed: ModuleNotFoundError: No module named 'no_such"
    with open_rollouts(config, 0, lambda start: start()) as rollouts, pytest.raises(UserError, match=told):
        rollouts.wait_ready(quiet)
    assert not list((tmp_path / "run" / "logs").glob("server*"))


def test_a_killed_controller_is_noticed_at_once(config: Config) -> None:
    controller = start_controller(config, None)
    with RemoteRollouts(controller.address, controller) as rollouts:
        controller.process.kill()
        controller.process.wait(10)
        with pytest.raises(ControllerError, match=r"cannot be reached.*controller\.log"):
            rollouts.wait(1, quiet, nobody)


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


def listening(pid: int) -> set[str]:
    """Addresses at which a process and those that it started accept connections."""
    processes = map(psutil.Process, [pid, *descendants(pid)])
    connections = [one for process in processes for one in process.net_connections("inet")]
    return {str(one.laddr[0]) for one in connections if one.status == psutil.CONN_LISTEN}


def test_one_node_reaches_it_over_loopback_and_several_at_the_address_of_the_first(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 stands for a node's private address: nothing else of the node is opened."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    for world_size, address in (("1", "127.0.0.1"), ("2", "127.0.0.2")):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        controller = start_controller(config, None)
        with RemoteRollouts(controller.address, controller):
            assert controller.address.url.startswith(f"http://{address}:")
            assert listening(controller.process.pid) == {address}


@pytest.mark.parametrize(("means", "told"), [("127.0.1.1", "which others cannot reach"), (None, "has no address")])
def test_a_host_name_that_leads_nowhere_is_refused(
    monkeypatch: pytest.MonkeyPatch, means: str | None, told: str
) -> None:
    def lookup(name: str) -> str:
        if means is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return means

    monkeypatch.setattr(socket, "gethostbyname", lookup)
    with pytest.raises(UserError, match=rf"MASTER_ADDR=node7 .*{told}.*LOCAL_ADDR"):
        controller_host({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node7"})


def test_a_run_folder_that_nodes_do_not_share_is_noticed(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "SHARED_SECONDS", 0.2)
    elsewhere = Address("http://10.0.0.7:1", "token", tmp_path / "not" / "here.log")
    with pytest.raises(RuntimeError, match=r"run\.dir must lie on a file system that all trainer nodes share"):
        open_rollouts(config, 8, lambda start: elsewhere)


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
