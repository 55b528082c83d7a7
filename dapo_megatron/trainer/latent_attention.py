"""Multi-head latent attention without Transformer Engine: what megatron-core's own does differently there."""

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from dapo_megatron.trainer import device


class WholeLinear(torch.nn.Module):
    """A linear without bias that every tensor-parallel rank has whole. Under sequence parallelism each computes its own
    tokens, and megatron adds up their weight gradients.
    """

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=device.current_device())
        )
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[T, 1, inputs] -> [T, 1, outputs], and no bias."""
        return torch.nn.functional.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Nothing, under the key that checkpoints have for every linear of megatron's and Transformer Engine's."""

    def set_extra_state(self, state: None) -> None:
        """Nothing to restore."""


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention whose projections to the small vectors are whole on every rank, as Transformer Engine has them.

    megatron-core's own layers split them over the tensor-parallel ranks, and its backward pass then gives the rotated
    part of the key the gradient of one rank's heads instead of all heads'.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        # `trainer.build` gives the positions; megatron's own for YaRN ask for CUDA's pinned memory when they are built.
        rope_type, config.rope_type = config.rope_type, "rope"
        super().__init__(config, *args, **kwargs)
        config.rope_type = rope_type
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width)
