"""The policy: which model, which layout, how it is updated."""

from typing import Any, Literal

from pydantic import Field

from dapo_megatron.config.base import Section
from dapo_megatron.config.precision import Fp8Config

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"]


class ModelConfig(Section):
    """The checkpoint to start from."""

    path: str = Field(
        description="Folder with config.json, tokenizer files and weights: safetensors, or a Megatron checkpoint that "
        "was converted or saved by a run (whose weights then start this one, in their precision, not its fp32 masters)."
    )


class ParallelConfig(Section):
    """Megatron layout. Data parallelism is what is left: ranks / (tensor x pipeline x context)."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size; must divide heads and KV heads.")
    sequence: bool = Field(
        False,
        description="Sequence parallelism: norms and residuals are split over the tensor-parallel ranks. Needs "
        "tensor > 1; experts with tensor > 1 need it.",
    )
    pipeline: int = Field(
        1, ge=1, description="Pipeline stages; must divide the layers, unless `pipeline_layers` says how many each has."
    )
    virtual_pipeline: int = Field(
        1, ge=1, description="Model chunks per pipeline stage (interleaved schedule). More than 1 needs pipeline > 1."
    )
    pipeline_layers: list[int] | None = Field(
        None,
        description="Layers of each model chunk, in the order of the model: pipeline x virtual_pipeline numbers, for "
        "stages that are not alike (the first also has the embedding, the last the output layer). null: equal.",
    )
    context: int = Field(
        1, ge=1, description="Context-parallel size: each sequence is split over this many ranks, load-balanced."
    )
    context_comm: Literal["p2p", "all_gather", "a2a"] = Field(
        "p2p", description="How Transformer Engine's attention exchanges keys and values; local attention gathers them."
    )
    expert: int = Field(1, ge=1, description="Expert-parallel size; must divide the number of experts.")
    expert_tensor: int = Field(1, ge=1, description="Tensor-parallel size within each expert.")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense model and share each micro-batch."""
        return self.tensor * self.pipeline * self.context

    def layout(self, ranks: int) -> dict[str, Any]:
        """What a state as it lies in the optimizer's buffers and the run that loads it have in common."""
        sizes = ("tensor", "pipeline", "virtual_pipeline", "pipeline_layers", "context", "expert", "expert_tensor")
        return {name: getattr(self, name) for name in sizes} | {"data": ranks // self.model_ranks}

    @property
    def sequence_multiple(self) -> int:
        """Each packed sequence is padded to a multiple of this: two chunks per context-parallel rank."""
        return 2 * self.context if self.context > 1 else 1


class TrainingConfig(Section):
    """Mini-batches, micro-batches and precision."""

    mini_batch: int = Field(512, ge=1, description="Responses per optimizer update; a multiple of samples_per_prompt.")
    micro_batch_tokens: int = Field(
        24576,
        ge=1,
        description="Most packed tokens (prompt, response and padding) in one forward pass; context-parallel ranks "
        "share them.",
    )
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = Field(
        "bf16",
        description="Parameters and arithmetic; master weights and gradients are always fp32. fp8: matrix products of "
        "the layers in FP8 through Transformer Engine, as `training.fp8` says; everything else in bf16.",
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config, description="Scaling recipe, where precision is fp8.")
    layer_backend: Literal["auto", "te", "local"] = Field(
        "auto",
        description="te: Transformer Engine's layers; local: megatron-core's with our attention; auto: te where it can "
        "be used and has kernels for the precision (all but fp32).",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations computed again in the backward pass: none, those of `recompute_modules`, or all but "
        "each layer's input.",
    )
    recompute_modules: list[RecomputeModule] = Field(
        ["core_attn"], description="What `recompute: selective` computes again."
    )
    sequence_multiple: int = Field(
        1,
        ge=1,
        description="Each sequence is padded to a multiple of this many tokens, and of what the layout asks for. "
        "Larger values give kernels fewer distinct shapes.",
    )
    moe_aux_loss: float = Field(
        0.0,
        ge=0,
        description="Coefficient of megatron's load-balancing loss of the experts. It is defined per micro-batch and "
        "counts padding, so that it, alone of all, depends on how a mini-batch is cut.",
    )
    router_replay: Literal["off", "R2", "R3"] = Field(
        "off",
        description="Which experts tokens go to in the update. off: those the router chooses. R2: those it chose when "
        "the old log-probs were computed. R3: those the servers chose when they generated the answer, there too.",
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
    cpu_offload: float = Field(
        0.0, ge=0, le=1, description="Share of the optimizer's states and master weights kept in host memory."
    )
    clip_grad: float = Field(1.0, ge=0, description="Largest norm of the whole gradient; 0 switches clipping off.")
