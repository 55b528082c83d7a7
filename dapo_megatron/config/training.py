"""The policy: which model, which layout, how it is updated."""

from typing import Literal

from pydantic import Field

from dapo_megatron.config.base import Section


class ModelConfig(Section):
    """The Hugging Face checkpoint to start from."""

    path: str = Field(description="Folder with config.json, tokenizer files and safetensors.")


class ParallelConfig(Section):
    """Megatron layout. Data parallelism is what is left: ranks / (tensor x pipeline)."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size; must divide heads and KV heads.")
    pipeline: int = Field(1, ge=1, description="Pipeline stages; must divide the layers.")


class TrainingConfig(Section):
    """Mini-batches, micro-batches and precision."""

    mini_batch: int = Field(512, ge=1, description="Responses per optimizer update; a multiple of samples_per_prompt.")
    micro_batch_tokens: int = Field(
        24576, ge=1, description="Most packed tokens (prompt and response) in one forward pass on one rank."
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="bf16 parameters with fp32 master weights and gradients, or everything in fp32."
    )
    log_prob_chunk: int = Field(
        1024, ge=1, description="Tokens whose logits exist at the same time when log-probs are computed."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per trainer rank. null: cores / ranks.")


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Learning rate after the warm-up; constant from then on.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW second-moment decay.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    warmup_steps: int = Field(20, ge=0, description="Linear warm-up over this many rollout steps (not updates).")
    clip_grad: float = Field(1.0, ge=0, description="Largest norm of the whole gradient; 0 switches clipping off.")
