"""The vLLM servers that generate answers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from dapo_megatron.config.base import Section
from dapo_megatron.errors import UserError

LONGEST_PUSH = 540
"""Seconds: less than the 10 minutes that a collective of the trainer may take (trainer/parallel.py)."""

HAVE_EFFECT_IN = {"servers": ("managed",), "first_gpu": ("managed",), "max_restarts": ("managed", "colocated")}
"""Modes in which a key says something; where external servers come from has rules of its own."""

FIRST_PORT = 8000
"""Port of a host's first server where `port` does not name another; launch/rollout_fleet.sh begins there too."""


class FleetConfig(Section):
    """Where servers come from, and how each is started: by the run itself, or by `dapo-megatron serve`."""

    mode: Literal["managed", "external", "colocated"] = Field(
        "managed",
        description="`managed`: the run starts and stops its servers, on the first trainer node. `external`: they were "
        "started elsewhere, see launch/rollout_fleet.sh. `colocated`: on the trainers' own GPUs, taking turns.",
    )
    urls: list[str] = Field(
        default_factory=list, description="`external` only: base URLs of the servers, such as http://10.0.0.7:8000."
    )
    urls_file: str | None = Field(
        None,
        description="`external` only, instead of `urls`: a file with a URL a line, as launch/rollout_fleet.sh writes. "
        "It is read again when it changes: servers join and leave during a run.",
    )
    hosts: str | None = Field(
        None,
        description="`external` only, instead of `urls`: a Slurm host list, such as gpu[01-04,07]. Each host has "
        "`servers_per_host` servers, from `port` on.",
    )
    servers_per_host: int = Field(1, ge=1, description="With `hosts` only: servers on each.")
    token_env: str = Field(
        "DAPO_SERVER_TOKEN",
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the token that opens the servers of `dapo-megatron serve`. Servers that "
        "the run starts get a random one.",
    )
    servers: int = Field(1, ge=1, description="`managed` only: how many vLLM servers to start.")
    tensor: int = Field(1, ge=1, description="Tensor-parallel size of each server.")
    pipeline: int = Field(1, ge=1, description="Pipeline stages of each server.")
    expert_parallel: bool = Field(
        False, description="Whole experts on the tensor-parallel ranks of a server, instead of a part of each expert."
    )
    python: str | None = Field(
        None,
        description="Python of the servers' environment, where it is not that of the command that starts them: a torch "
        "that Transformer Engine was built for cannot be shared with vLLM. It has vLLM and this package.",
    )
    first_gpu: int | None = Field(
        None,
        ge=0,
        description="`managed` only: first of the GPUs that servers use, `tensor` each, counted among those this node "
        "shows to the trainer. null: the one after the trainer's ranks.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Weights' dtype in the servers, and on the wire of a weight push."
    )
    host: str = Field(
        "127.0.0.1",
        description="Address the servers bind to, and where servers and senders meet rank 0 for a push: loopback, or, "
        "where some of them are on other nodes, a private address of the node of rank 0.",
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port of the first server (with `hosts`: of each host); the next ones count up. null: free ports, "
        "with `hosts` from 8000 on.",
    )
    kv_cache_gb: float = Field(0.25, gt=0, description="KV cache of each server on a CPU, in GiB.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory each server may use.")
    max_num_seqs: int = Field(128, ge=1, description="Answers that one server generates at the same time.")
    block_size: int = Field(
        32, ge=1, description="KV cache block, in tokens. Prompts shorter than a block never hit the prefix cache."
    )
    threads: int = Field(1, ge=1, description="CPU threads of each server.")
    start_timeout: float = Field(600, gt=0, description="Seconds to wait for a server to become healthy.")
    request_timeout: float = Field(3600, gt=0, description="Seconds after which one answer counts as failed.")
    request_retries: int = Field(
        3, ge=0, description="How often a failed answer is continued, on another server where there is one."
    )
    stream_interval: int = Field(
        64,
        ge=1,
        description="Tokens that a server sends at a time. What it has not sent is lost when it dies; small values "
        "cost processor time.",
    )
    stall_timeout: float = Field(
        300,
        gt=0,
        description="Seconds without a token of any answer, or a reply to a health check, after which a server counts "
        "as hung: it is taken out, and its answers are continued elsewhere.",
    )
    health_every: float = Field(10, gt=0, description="Seconds between two health checks of a server.")
    max_restarts: int = Field(
        3,
        ge=0,
        description="`managed` and `colocated` only: how often a server is started again when it ended or hangs, each.",
    )
    workers: int | None = Field(
        None,
        ge=0,
        description="Processes that talk to the servers and grade answers. 0: the controller does it itself. null: one "
        "for every 8 servers, none for up to 8.",
    )
    on_push: Literal["keep", "abort"] = Field(
        "abort",
        description="What happens to answers under way when weights are pushed (rollout.pipeline=async). keep: they "
        "are paused, and go on with the keys and values of the old weights. abort: they are ended and continued, so "
        "that keys and values are computed again.",
    )
    probe_every: int | None = Field(
        None,
        ge=1,
        description="Compare the servers' log-probs with the trainer's after every this many pushes, too, before "
        "answers go on. null: when a server is started or comes back.",
    )
    push_timeout: float = Field(
        300, gt=0, description=f"Deadline of one weight push, in seconds; at most {LONGEST_PUSH}."
    )
    delta_push: bool = Field(
        False,
        description="Send only the values that changed since the last push, where that is less. The servers keep a "
        "copy of their part of the weights in host memory.",
    )
    weight_format: Literal["plain", "fp8_block"] = Field(
        "plain",
        description="plain: weights travel in `dtype`. fp8_block: matrices of the layers travel, and are served, in "
        "FP8 with a scale for each block of 128 x 128.",
    )
    bucket_mb: float = Field(64, gt=0, description="Weights travel in buckets of about this many MiB.")
    extra_args: list[str] = Field(default_factory=list, description="More arguments for vLLM's API server.")

    @model_validator(mode="after")
    def _settings_fit_the_mode(self) -> "FleetConfig":
        sources = [name for name in ("urls", "urls_file", "hosts") if getattr(self, name)]
        if self.mode == "external" and len(sources) != 1:
            raise ValueError("mode is external: give exactly one of `urls`, `urls_file` and `hosts`")
        if self.mode != "external" and sources:
            raise ValueError(f"`{sources[0]}` is for mode external, not {self.mode}")
        for key, modes in HAVE_EFFECT_IN.items():
            # What is set counts only where it says something else: a configuration is also read back with all its keys.
            if self.mode not in modes and (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(
                    f"`{key}` ({value}) is for mode {' and '.join(modes)}, and does nothing with {self.mode}"
                )
        if self.servers_per_host > 1 and not self.hosts:
            raise ValueError("`servers_per_host` goes with `hosts`")
        if self.mode == "colocated" and self.delta_push:
            raise ValueError("`delta_push` saves nothing with mode colocated, where weights do not leave their GPU")
        if self.weight_format == "fp8_block" and self.dtype == "float32":
            raise ValueError("weight_format fp8_block needs `dtype` bfloat16 or float16: what its kernels compute with")
        if self.probe_every is not None and self.on_push == "keep":
            raise ValueError("`probe_every` needs `on_push` abort: servers that are paused answer no probe")
        if self.push_timeout > LONGEST_PUSH:
            raise ValueError(
                f"`push_timeout` must be at most {LONGEST_PUSH} seconds: trainer ranks that do not send wait for the "
                "end of a push in a collective, which fails after 600"
            )
        for url in self.urls:
            check_url(url, "urls")
        if self.hosts:
            expand_hosts(self.hosts)
        return self

    @property
    def source(self) -> str:
        """The key that names external servers."""
        return next((f"fleet.{key}" for key in ("urls", "urls_file", "hosts") if getattr(self, key)), "fleet.servers")

    @property
    def world_size(self) -> int:
        """Workers of each server."""
        return self.tensor * self.pipeline


def server_urls(fleet: FleetConfig) -> list[str]:
    """Base URLs of external servers, in order, each once; a file is read anew. Empty for other modes.

    Raises:
        UserError: when `urls_file` cannot be read, or a line of it is no URL.
    """
    if fleet.urls_file is not None:
        urls = _read_urls(fleet.urls_file)
    elif fleet.hosts is not None:
        ports = range(fleet.port or FIRST_PORT, (fleet.port or FIRST_PORT) + fleet.servers_per_host)
        urls = [f"http://{host}:{port}" for host in expand_hosts(fleet.hosts) for port in ports]
    else:
        urls = fleet.urls
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def _read_urls(path: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"fleet.urls_file: {path} cannot be read: {error}") from None
    urls = [line for line in lines if line and not line.startswith("#")]
    for url in urls:
        try:
            check_url(url, path)
        except ValueError as error:
            raise UserError(f"fleet.urls_file: {error}") from None
    return urls


def expand_hosts(text: str) -> list[str]:
    """Names in a Slurm host list: `gpu[01-03,07],login1` -> gpu01 gpu02 gpu03 gpu07 login1. Zeros in front stay.

    Raises:
        ValueError: for anything else.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text):
        raise ValueError(f"hosts: {text!r} is no Slurm host list such as gpu[01-04,07],login1")
    items = re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text)
    return [name for item in items for name in _expand(item)]


def _expand(item: str) -> Iterator[str]:
    """The names of one item of a host list, whose first brackets vary slowest."""
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    ranges, _, tail = rest.partition("]")
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"hosts: [{ranges}] must hold numbers and ranges of them, such as [01-04,07]")
        for number in range(int(first), int(last) + 1):
            yield from (f"{head}{number:0{len(first)}}{end}" for end in _expand(tail))


def check_url(url: str, source: str) -> None:
    """Raises ValueError, which names `source`, unless `url` is http(s)://host:port and nothing else."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.path.strip("/")
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{source}: {url!r} must look like http://10.0.0.7:8000")
