"""What the launch scripts refuse before anything starts, and what they make of their environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import REPOSITORY
from tests.unit.config_helpers import write_config

# Stands for the Python that becomes the launcher: it shows its arguments and what it would hand to the ranks.
RECORDER = """#!{python}
import json, os, subprocess, sys
if sys.argv[1] != "-m":
    sys.exit(subprocess.run([{python!r}, *sys.argv[1:]]).returncode)
names = ("OMP_", "CUDA_DEVICE", "PYTORCH_", "TORCH_", "NCCL_", "NVTE_")
environment = {{name: value for name, value in os.environ.items() if name.startswith(names)}}
print(json.dumps({{"arguments": sys.argv[1:], "environment": environment}}))
"""
SMI = """#!/bin/sh
case "$1" in *compute_cap*) for i in 0 1 2 3; do echo {capability}; done ;; *) seq 0 3 ;; esac
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def run(script: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "HOME": os.environ["HOME"]}
    environment |= {"PYTHON": sys.executable} | variables
    command = [str(REPOSITORY / "launch" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def launched(tmp_path: Path, *arguments: str, capability: str = "", **variables: str) -> dict[str, dict[str, str]]:
    """What launch/train.sh starts, on a node with 4 GPUs of `capability` ("": none)."""
    python = executable(tmp_path / "python", RECORDER.format(python=sys.executable))
    if capability:
        (tmp_path / "bin").mkdir()
        executable(tmp_path / "bin" / "nvidia-smi", SMI.format(capability=capability))
        variables["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    result = run("train.sh", *arguments, PYTHON=str(python), **variables)
    assert result.returncode == 0, result.stderr
    told: dict[str, dict[str, str]] = json.loads(result.stdout)
    return told


FAULTS: list[tuple[list[str], dict[str, str], str]] = [
    ([], {}, "give a configuration"),
    (["nowhere.yaml"], {}, "the configuration nowhere.yaml does not exist"),
    (["CONFIG", "--nproc"], {}, "'--nproc' is not KEY=VALUE"),
    (["CONFIG", "run.stepz=2"], {}, "unknown key run.stepz; did you mean run.steps?"),
    (["CONFIG"], {"PYTHON": "/nowhere/python"}, "/nowhere/python is not installed"),
    (["CONFIG"], {"NNODES": "two"}, "NNODES=two must be a positive number"),
    (["CONFIG"], {"NPROC": "0"}, "NPROC=0 must be a positive number"),
    (["CONFIG"], {"NNODES": "2"}, "NNODES=2 needs RDZV_ENDPOINT=HOST:PORT"),
    (["CONFIG"], {"NNODES": "2", "RDZV_ENDPOINT": "node0"}, "RDZV_ENDPOINT=node0 must be HOST:PORT"),
]


@pytest.mark.parametrize(("arguments", "variables", "told"), FAULTS)
def test_trainer_faults_are_told_before_anything_starts(
    config_file: Path, arguments: list[str], variables: dict[str, str], told: str
) -> None:
    result = run("train.sh", *(str(config_file) if word == "CONFIG" else word for word in arguments), **variables)
    assert (result.returncode, result.stdout) == (2, "")
    assert told in result.stderr


FLEET_FAULTS: list[tuple[dict[str, str], str]] = [
    ({"TOKEN_FILE": ""}, "TOKEN_FILE is not set"),
    ({"URLS_FILE": ""}, "URLS_FILE is not set"),
    ({"SERVERS": "0"}, "SERVERS=0 must be a positive number"),
    ({"FIRST_INDEX": "a"}, "FIRST_INDEX=a must be a number"),
    (
        {"CUDA_VISIBLE_DEVICES": "0,1", "SERVERS": "3"},
        "3 servers of fleet.tensor x fleet.pipeline = 1 GPUs need more than the 2 GPUs",
    ),
]


@pytest.mark.parametrize(("variables", "told"), FLEET_FAULTS)
def test_fleet_faults_are_told_before_anything_starts(
    config_file: Path, tmp_path: Path, variables: dict[str, str], told: str
) -> None:
    files = {"TOKEN_FILE": str(tmp_path / "token"), "URLS_FILE": str(tmp_path / "urls")}
    result = run("rollout_fleet.sh", str(config_file), **(files | variables))
    assert (result.returncode, result.stdout) == (2, "")
    assert told in result.stderr
    assert not (tmp_path / "urls").exists()


def test_servers_split_the_gpus_and_all_end_with_one(config_file: Path, tmp_path: Path) -> None:
    """The second of two servers fails: the script ends the first, says 1, and publishes nothing."""
    server = """#!{python}
import os, subprocess, sys, time
if sys.argv[1] != "-m":
    sys.exit(subprocess.run([{python!r}, *sys.argv[1:]]).returncode)
index = sys.argv[sys.argv.index("--index") + 1]
with open({folder!r} + "/started", "a") as file:
    print(index, os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[-6:-1], file=file)
time.sleep(60) if index == "4" else sys.exit(2)
"""
    python = executable(tmp_path / "python", server.format(python=sys.executable, folder=str(tmp_path)))
    variables = {"TOKEN_FILE": str(tmp_path / "token"), "URLS_FILE": str(tmp_path / "urls"), "FIRST_INDEX": "4"}
    variables |= {"CUDA_VISIBLE_DEVICES": "2,3,6,7", "PYTHON": str(python), "SERVER_HOST": "10.0.0.7"}
    result = run("rollout_fleet.sh", str(config_file), "fleet.tensor=2", **variables)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert sorted((tmp_path / "started").read_text().splitlines()) == [
        "4 2,3 --host 10.0.0.7 --port 8000 --token-file",
        "5 6,7 --host 10.0.0.7 --port 8001 --token-file",
    ]
    assert not (tmp_path / "urls").exists()


def test_the_list_of_servers_is_replaced_as_a_whole(config_file: Path, tmp_path: Path) -> None:
    """The run reads it at any time: half a line would be another server, and an empty file none at all."""
    server = """#!{python}
import subprocess, sys, time
if sys.argv[1] != "-m":
    sys.exit(subprocess.run([{python!r}, *sys.argv[1:]]).returncode)
print("http://10.0.0.7:" + sys.argv[sys.argv.index("--port") + 1], flush=True)
time.sleep(60)
"""
    python, urls = executable(tmp_path / "python", server.format(python=sys.executable)), tmp_path / "urls"
    urls.write_text("http://10.0.0.6:8000\n")
    before = urls.open()  # as one that reads just then
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PYTHON": str(python), "PORT": "8000"}
    environment |= {"TOKEN_FILE": str(tmp_path / "token"), "URLS_FILE": str(urls), "SERVERS": "1"}
    command = [str(REPOSITORY / "launch" / "rollout_fleet.sh"), str(config_file), "fleet.host=10.0.0.7"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert "1 servers are ready" in script.stdout.readline()
        published = urls.open()
        script.terminate()
        assert script.wait(30) == 0
    assert urls.read_text() == before.read() == "http://10.0.0.6:8000\n"
    assert published.read() == "http://10.0.0.6:8000\nhttp://10.0.0.7:8000\n"
    for file in (before, published):
        file.close()


def test_one_node_without_gpus(config_file: Path, tmp_path: Path) -> None:
    told = launched(tmp_path, str(config_file), "training.threads=3", "run.steps=2")
    assert told["arguments"] == [
        *["-m", "dapo_megatron.launcher", "--nnodes=1", "--nproc-per-node=1", "--standalone"],
        *["-m", "dapo_megatron.train", str(config_file), "training.threads=3", "run.steps=2"],
    ]
    assert told["environment"] == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}


def test_one_node_of_many(config_file: Path, tmp_path: Path) -> None:
    node = {"NNODES": "16", "NPROC": "8", "RDZV_ENDPOINT": "node0:29400", "NODE_RANK": "3", "LOCAL_ADDR": "10.0.0.4"}
    told = launched(tmp_path, str(config_file), **node)
    assert told["arguments"][1:9] == [
        *["dapo_megatron.launcher", "--nnodes=16", "--nproc-per-node=8", "--rdzv-backend=c10d"],
        *["--rdzv-endpoint=node0:29400", f"--rdzv-id={tmp_path / 'run'}"],
        *["--rdzv-conf=join_timeout=1800,is_host=false", "--local-addr=10.0.0.4"],
    ]


@pytest.mark.parametrize(
    ("capability", "override", "connections", "scales"),
    [
        ("9.0", "parallel.tensor=1", None, None),
        ("9.0", "parallel.tensor=2", "1", None),
        ("9.0", "parallel.context=2", "1", None),
        ("9.0", "training.precision=fp8", None, "1"),
        ("10.0", "parallel.tensor=2", None, None),
        ("10.0", "training.precision=fp8", None, None),
    ],
)
def test_settings_of_gpus(
    config_file: Path, tmp_path: Path, capability: str, override: str, connections: str | None, scales: str | None
) -> None:
    told = launched(tmp_path, str(config_file), override, capability=capability)
    assert "--nproc-per-node=4" in told["arguments"]
    assert told["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    assert told["environment"].get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES") == scales
    assert told["environment"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_settings_of_the_user_win(config_file: Path, tmp_path: Path) -> None:
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "", "OMP_NUM_THREADS": "5", "NCCL_DEBUG": "INFO"}
    told = launched(tmp_path, str(config_file), "parallel.tensor=2", capability="9.0", **own)
    assert own.items() - {("PYTORCH_ALLOC_CONF", "")} <= told["environment"].items()
