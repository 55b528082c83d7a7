"""What a server is started with."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import server
from dapo_megatron.rollout.server import free_port, gpu_slice, server_arguments, server_environment, start_server
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


def test_weights_that_vllm_cannot_read_are_left_to_the_first_push(tmp_path: Path) -> None:
    def load_format() -> list[str]:
        words = server_arguments(
            model=str(tmp_path), port=7, fleet=FleetConfig(), max_model_len=64, seed=5, on_cpu=True
        )
        return words[words.index("--load-format") :][:2] if "--load-format" in words else []

    (tmp_path / "model.safetensors").touch()
    assert load_format() == []
    (tmp_path / "model.safetensors").rename(tmp_path / "__0_0.distcp")
    assert load_format() == ["--load-format", "dummy"]


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


def test_what_suits_the_trainer_alone_is_not_inherited() -> None:
    inherited = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment = server_environment(inherited, fleet=FleetConfig(), token="secret", on_cpu=False)
    assert not inherited.keys() & environment.keys()


@pytest.mark.parametrize(
    ("visible", "first", "expected"),
    [(None, 4, "4,5"), ("", 0, "0,1"), ("3,5,6,7", 2, "6,7"), ("GPU-a,GPU-b", 0, "GPU-a,GPU-b")],
)
def test_gpus_of_a_server(visible: str | None, first: int, expected: str) -> None:
    assert gpu_slice(visible, first, 2) == expected


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"needs GPUs 4 to 5 of this node, but CUDA_VISIBLE_DEVICES=0,1,2,3,4 has 5"):
        gpu_slice("0,1,2,3,4", 4, 2)


def test_server_on_a_gpu_gets_its_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(server, "runs_on_cpu", lambda python: False)
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append(env | {"command": command[0]}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    common = {"model": "m", "index": 1, "port": None, "max_model_len": 64, "seed": 1, "token": "secret"}
    fleet = FleetConfig(tensor=2, python="/opt/fleet/bin/python")
    start_server(fleet=fleet, log_path=tmp_path / "log", first_gpu=6, **common)
    assert started[0]["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert started[0]["command"] == "/opt/fleet/bin/python"
    start_server(fleet=fleet, log_path=tmp_path / "log", **common)
    assert started[1]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_another_python_is_asked_for_its_vllm(tmp_path: Path) -> None:
    assert server.runs_on_cpu(sys.executable) == server.runs_on_cpu()
    with pytest.raises(UserError, match=r"fleet.python=/nowhere/python cannot be run"):
        server.runs_on_cpu("/nowhere/python")
    bare = tmp_path / "python"  # no site-packages, as a Python that has neither vLLM nor this package
    bare.write_text(f'#!/bin/sh\ncd /; exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match="must have vLLM and dapo-megatron installed: ModuleNotFoundError"):
        server.runs_on_cpu(str(bare))


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
