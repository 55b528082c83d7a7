"""The configuration of a run as its frozen reference policy sees it. No torch."""

import math

from dapo_megatron.config.precision import Fp8Config, packed_alignment, sequence_alignment
from dapo_megatron.config.run import Config
from dapo_megatron.config.training import ParallelConfig, TrainingConfig


def reference_config(config: Config) -> Config:
    """The run as its reference policy sees it: its own model, layout and precision, and nothing of the backward pass.

    Where the layout is its own, micro-batches have the size of the policy's, rounded up to what the layout asks for.
    """
    reference = config.reference
    parallel = reference.parallel or config.parallel
    precision = reference.precision or ("bf16" if config.training.precision == "fp8" else config.training.precision)
    forward_only = TrainingConfig.model_validate({})
    training = config.training.model_copy(
        update={
            "precision": precision,
            "fp8": Fp8Config(),
            "recompute": forward_only.recompute,
            "recompute_modules": forward_only.recompute_modules,
            "moe_aux_loss": forward_only.moe_aux_loss,
            "router_replay": forward_only.router_replay,
        }
    )
    training.micro_batch_tokens = _micro_batch_tokens(config.longest_sequence, training, parallel)
    model = config.model.model_copy(update={"path": reference.path or config.model.path})
    return config.model_copy(update={"model": model, "parallel": parallel, "training": training})


def _micro_batch_tokens(longest: int, training: TrainingConfig, parallel: ParallelConfig) -> int:
    """`training.micro_batch_tokens`, or more where the longest sequence with its padding or the alignment need it."""
    alignment, multiple = sequence_alignment(training, parallel), packed_alignment(training, parallel)
    tokens = max(training.micro_batch_tokens, math.ceil(longest / alignment) * alignment)
    return math.ceil(tokens / multiple) * multiple


def reference_keys(config: Config) -> dict[str, str]:
    """For `errors.renamed_keys`: keys of the policy, and those of the section `reference` that stand in their place."""
    reference = config.reference
    names = {
        "model.path": ("reference.path", reference.path),
        "parallel.": ("reference.parallel.", reference.parallel),
        "training.precision": ("reference.precision", reference.precision),
    }
    return {key: name for key, (name, given) in names.items() if given is not None}
