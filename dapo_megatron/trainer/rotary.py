"""Rotary positions: frequencies for both backends, and the angles of packed sequences without Transformer Engine."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dapo_megatron.models.architecture import Architecture, Llama3Scaling, YarnScaling

if TYPE_CHECKING:
    from dapo_megatron.trainer.attention import PackedSequences


def inverse_frequencies(arch: Architecture) -> Tensor:
    """Radians that each pair of rotated dimensions turns by per token, fp32 [rotary_dim / 2], fastest first."""
    exponent = torch.arange(0, arch.rotary_dim, 2, dtype=torch.float32) / arch.rotary_dim
    frequency = 1.0 / arch.rope_theta**exponent
    match arch.rope_scaling:
        case None:
            return frequency
        case Llama3Scaling() as scaling:
            share = _llama3_share(frequency, scaling)
        case YarnScaling() as scaling:
            share = _yarn_share(arch.rope_theta, arch.rotary_dim, scaling)
    return frequency * share + frequency / scaling.factor * (1 - share)


def _llama3_share(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    """How much of each frequency stays as it is: a ramp over the turns within the original context."""
    turns = scaling.original_positions * frequency / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    return ((turns - scaling.low_freq_factor) / width).clamp(0, 1)


def _yarn_share(theta: float, dim: int, scaling: YarnScaling) -> Tensor:
    """How much of each frequency stays as it is: a ramp over the dimensions (arXiv 2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """The pair of dimensions, as a fraction, that makes so many turns within the original context."""
        return dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0, 1)


def rotary_scale(scaling: Llama3Scaling | YarnScaling | None) -> float:
    """By what YaRN multiplies the rotated part of queries and keys, beside the softmax's own scale."""
    if not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
        return 1.0
    growth = 0.1 * math.log(scaling.factor)
    return (growth * scaling.mscale + 1) / (growth * scaling.mscale_all_dim + 1)


class PackedRotary(torch.nn.Module):
    """Rotary angles of explicit positions.

    megatron asks for a sequence length first and hands it to `forward`; the positions of the packed batch travel
    in its place, so the module keeps no state between batches.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.inverse_frequency = inverse_frequencies(arch)  # a plain attribute: bfloat16() must not round it

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, decoder_input: Any, config: Any, packed: "PackedSequences"
    ) -> Tensor:
        """The positions, int64 [T], as the "length" that `forward` gets."""
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles [T, 1, 1, rotary_dim] in fp32."""
        angles = positions.float()[:, None] * self.inverse_frequency.to(positions.device)
        return torch.cat([angles, angles], -1)[:, None, None]


class LatentRotary(PackedRotary):
    """The same for latent attention, whose queries have lost the batch dimension, and which asks YaRN for a scale."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.scale = rotary_scale(arch.rope_scaling) if isinstance(arch.rope_scaling, YarnScaling) else None

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles [T, 1, rotary_dim] in fp32; with YaRN (angles, scale)."""
        angles = super().forward(positions)[:, 0]
        return angles if self.scale is None else (angles, self.scale)
