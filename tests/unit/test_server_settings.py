"""What a server is started with."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.server import free_port, server_arguments, server_environment, start_server
from tests.models import REPOSITORY


def arguments(fleet: FleetConfig, *, on_cpu: bool) -> list[str]:
    return server_arguments(model="m", port=7, fleet=fleet, max_model_len=64, seed=5, on_cpu=on_cpu)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_arguments_on_a_cpu() -> None:
    words = arguments(FleetConfig(kv_cache_gb=0.5), on_cpu=True)
    assert value(words, "--kv-cache-memory-bytes") == str(2**29)
    assert "--enforce-eager" in words
    assert "--gpu-memory-utilization" not in words


def test_arguments_on_a_gpu() -> None:
    words = arguments(FleetConfig(gpu_memory_utilization=0.8, tensor=4), on_cpu=False)
    assert value(words, "--gpu-memory-utilization") == "0.8"
    assert value(words, "--tensor-parallel-size") == "4"
    assert "--enforce-eager" not in words
    assert "--kv-cache-memory-bytes" not in words


def test_extra_arguments_come_last() -> None:
    words = arguments(FleetConfig(extra_args=["--block-size", "16"]), on_cpu=True)
    assert words[-2:] == ["--block-size", "16"]


def test_environment_has_nothing_of_torchrun() -> None:
    inherited = dict.fromkeys(
        ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "GROUP_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"], "1"
    )
    environment = server_environment(
        inherited | {"PATH": "/bin"}, fleet=FleetConfig(threads=3), token="secret", on_cpu=True
    )
    assert not inherited.keys() & environment.keys()
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["DAPO_SERVER_TOKEN"] == "secret"
    assert environment["DAPO_SERVER_PARENT"] == str(os.getpid())


def test_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.1 cannot be used .* change fleet\.port"):
            start_server(
                model="m",
                index=0,
                port=port,
                fleet=FleetConfig(),
                max_model_len=64,
                seed=1,
                log_path=tmp_path / "server.log",
                token="secret",
            )
    assert not (tmp_path / "server.log").exists()


def test_free_ports_can_be_listened_on() -> None:
    socket.create_server(("127.0.0.1", free_port("127.0.0.1"))).close()


def test_launcher_needs_the_standard_library_alone_and_says_that_vllm_is_missing() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from dapo_megatron.rollout import server\n"
        "try: server.runs_on_cpu()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    # -S: no site-packages, as in an environment where nothing was ever installed.
    output = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.startswith("UserError vLLM is not installed for this Python: run `make setup`")
