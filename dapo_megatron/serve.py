"""One vLLM server for RL, started by hand or by launch/rollout_fleet.sh: `dapo-megatron serve CONFIG`.

It needs vLLM, pydantic and OmegaConf, but nothing of the trainer, so that it runs in the servers' own environment.
"""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rollout.server import Server, log_tail, start_server, stop_server, wait_until_healthy
from dapo_megatron.sync.fp8_plan import quantization_config

LOG_LINES = 15
MOST_SERVERS = 10_000
"""No two servers of a run, those started again included, sample with the same seed up to so many of a fleet."""


def start(
    config: Config,
    index: int,
    token: str,
    *,
    port: int | None = None,
    first_gpu: int | None = None,
    restarts: int = 0,
) -> Server:
    """Start server number `index` of the fleet of `config`; `start_server` says the rest.

    `port` replaces `fleet.port` + `index`. One that was started `restarts` times before has a log of its own, samples
    other answers, and gets its weights from the trainer.
    """
    if port is None and config.fleet.port is not None:
        port = config.fleet.port + index
    fp8 = config.fleet.weight_format == "fp8_block"
    name = f"server_{index}.restart_{restarts}" if restarts else f"server_{index}"
    return start_server(
        model=config.model.path,
        index=index,
        port=port,
        fleet=config.fleet,
        max_model_len=config.longest_sequence,
        seed=config.run.seed + restarts * MOST_SERVERS,
        log_path=Path(config.run.dir) / "logs" / f"{name}.log",
        token=token,
        first_gpu=first_gpu,
        routed_experts=config.training.router_replay == "R3",
        dummy_weights=restarts > 0 or fp8,  # the model's folder has no weights in FP8
        hf_overrides=quantization_config(architecture_of(config.model.path)) if fp8 else None,
    )


def serve(config: Config, index: int, token: str, port: int | None) -> int:
    """Start server number `index` of a fleet, print its URL once it is healthy, and wait until it ends.

    The server ends with this process: on SIGTERM and SIGINT, and when this process is killed.

    Returns:
        The exit code: 0 after a signal that asked for the end, 1 when the server ended by itself.

    Raises:
        UserError: when the server cannot start.
    """
    if not Path(config.model.path).is_dir():
        raise UserError(f"model.path: the folder {config.model.path} does not exist")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, through `finally`
    server = start(config, index, token, port=port)
    try:
        return _watch(server, config.fleet.start_timeout)
    except KeyboardInterrupt:
        return 0
    finally:
        stop_server(server)


def _watch(server: Server, start_timeout: float) -> int:
    wait_until_healthy(server, start_timeout)
    print(server.url, flush=True)
    code = server.process.wait()
    tail = "\n".join(f"    {line}" for line in log_tail(server.log_path, LOG_LINES))
    print(f"dapo-megatron: the server ended with code {code}; the end of {server.log_path}:\n{tail}", file=sys.stderr)
    return 1


def read_token(file: Path | None, variable: str, environment: Mapping[str, str] = os.environ) -> str:
    """The token that opens the server, from `file`, or from the environment variable `variable` where there is none.

    It is never an argument: every user of a machine can read those.

    Raises:
        UserError: if there is none, or it is not one word.
    """
    try:
        token = environment.get(variable, "") if file is None else file.read_text().strip()
    except OSError as error:
        raise UserError(f"--token-file {file} cannot be read: {error.strerror}") from None
    source = f"the environment variable {variable} (fleet.token_env)" if file is None else f"--token-file {file}"
    if not token:
        raise UserError(f"{source} holds no token: a server without one would be open to everybody")
    if len(token.split()) > 1:
        raise UserError(f"{source} must hold one word")
    return token
