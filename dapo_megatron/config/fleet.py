"""The vLLM servers that generate answers."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from dapo_megatron.config.base import Section


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
        description="Environment variable with the token that opens the servers of `dapo-megatron serve`. Servers of a "
        "`managed` fleet get a random one.",
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
    host: str = Field("127.0.0.1", description="Address the servers bind to: loopback or a private address.")
    port: int | None = Field(
        None, ge=1, le=65535, description="Port of the first server; the next ones count up. null: free ports."
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
        3, ge=0, description="`managed` only: how often a server that ended or hangs is started again, each."
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
        description="Compare the servers' log-probs with the trainer's after every this many pushes, too. null: when a "
        "server is started or comes back.",
    )
    push_timeout: float = Field(600, gt=0, description="Deadline of one weight push, in seconds.")
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
    def _urls_belong_to_external_servers(self) -> "FleetConfig":
        sources = [name for name in ("urls", "urls_file", "hosts") if getattr(self, name)]
        if self.mode == "external" and len(sources) != 1:
            raise ValueError("mode is external: give exactly one of `urls`, `urls_file` and `hosts`")
        if self.mode != "external" and sources:
            raise ValueError(f"`{sources[0]}` is for mode external, not {self.mode}")
        for url in self.urls:
            _check_url(url)
        return self


def _check_url(url: str) -> None:
    """Raises ValueError unless `url` is http(s)://host:port and nothing else."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.path.strip("/")
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"urls: {url!r} must look like http://10.0.0.7:8000")
