"""FP8 training: which recipe scales the operands, and to which multiples it ties the number of packed tokens."""

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dapo_megatron.config.base import Section

if TYPE_CHECKING:
    from dapo_megatron.config.training import ParallelConfig, TrainingConfig

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]

# Both dimensions of every operand, and with them the packed tokens, are multiples of this many elements: 16 bytes for
# the matrix units (the tokens are the last dimension where weight gradients are computed), or a block of scales.
ALIGNMENT: dict[Recipe, int] = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


class Fp8Config(Section):
    """How operands of matrix products are brought into FP8's range; read where `training.precision` is fp8.

    The defaults are the FP8 actor that needs no tuning: blocks bound the error where values differ in size, so that
    e4m3, the finer format, also holds the gradients, no layer must stay in bf16, nothing of it is part of a run state,
    and vLLM's `fp8_per_block` quantises weights by the same blocks.
    """

    recipe: Recipe = Field(
        "blockwise",
        description="What shares a scale. blockwise: 1 x 128 of activations and gradients, 128 x 128 of weights "
        "(Hopper and later); tensorwise: a tensor, from its own maximum (Ada and later); delayed: a tensor, from the "
        "maxima of past passes, so that two passes over the same tokens differ (Ada and later); mxfp8: 32 values, the "
        "scale a power of two (Blackwell; needs `param_gather`).",
    )
    format: Literal["e4m3", "hybrid"] = Field(
        "e4m3",
        description="Format of operands: e4m3 (3 bits of fraction, up to 448), or hybrid, with gradients in e5m2 (2 "
        "bits, up to 57,344), whose range a scale per tensor may need.",
    )
    first_last_layers_bf16: bool = Field(
        False,
        description="Keep the first and last layers in bf16: they react most to rounding. Worth its small cost with "
        "tensorwise; delayed cannot.",
    )
    bf16_layers_at_start: int = Field(
        1, ge=0, description="With `first_last_layers_bf16`, layers in bf16 at the start; at most a pipeline stage."
    )
    bf16_layers_at_end: int = Field(
        1, ge=0, description="With `first_last_layers_bf16`, layers in bf16 at the end; at most a pipeline stage."
    )
    param_gather: bool = Field(
        False,
        description="Keep the layers' weights in FP8 and gather them in FP8 after an update: one byte a parameter "
        "instead of two, in memory and on the wire. fp32 master weights stay.",
    )
    margin: int = Field(0, ge=0, description="delayed: scales leave this many powers of two of headroom.")
    amax_history: int = Field(
        1024,
        ge=1,
        description="delayed: maxima of this many past passes are kept. Packed batches differ so much that the last "
        "pass alone predicts the next badly.",
    )
    amax_algorithm: Literal["max", "most_recent"] = Field(
        "max", description="delayed: the scale follows the largest maximum kept, or the newest."
    )


def sequence_alignment(training: "TrainingConfig", parallel: "ParallelConfig") -> int:
    """Each packed sequence is padded to a multiple of this many tokens: the layout's rule and the user's."""
    return math.lcm(parallel.sequence_multiple, training.sequence_multiple)


def packed_alignment(training: "TrainingConfig", parallel: "ParallelConfig") -> int:
    """The packed tokens T of a micro-batch, over all ranks that share it, are a multiple of this.

    Context parallelism cuts T into 2 chunks per rank, sequence parallelism a rank's tokens over the tensor-parallel
    ranks. In FP8 each piece that is quantised on its own, which is the smallest, has the recipe's alignment.
    """
    context = parallel.context
    pieces = context * (parallel.tensor if parallel.sequence else 1)
    per_piece = ALIGNMENT[training.fp8.recipe] if training.precision == "fp8" else 1
    return math.lcm(2 * context if context > 1 else 1, pieces * per_piece)
