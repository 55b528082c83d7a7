"""The vLLM servers that generate answers."""

from typing import Literal

from pydantic import Field

from dapo_megatron.config.base import Section


class FleetConfig(Section):
    """Servers started and stopped by the run itself (`managed`)."""

    servers: int = Field(1, ge=1, description="How many vLLM servers to start.")
    tensor: int = Field(1, ge=1, description="Tensor-parallel size of each server.")
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
    request_retries: int = Field(3, ge=0, description="How often a failed answer is asked for again.")
    push_timeout: float = Field(600, gt=0, description="Deadline of one weight push, in seconds.")
    bucket_mb: float = Field(64, gt=0, description="Weights travel in buckets of about this many MiB.")
    extra_args: list[str] = Field(default_factory=list, description="More arguments for vLLM's API server.")
