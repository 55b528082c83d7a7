"""Attention, rotary positions and norms for machines without Transformer Engine.

Packed sequences lie one after the other in a batch of one: hidden states are [T, 1, H]. No T x T mask ever exists:
sequences of similar length are attended to together, each only within itself.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Up to this length the scores are small enough to be written out, which is faster than torch's fused kernel where
# sequences are short: 11 ms against 56 ms forward and backward at 55 tokens in bf16 on one CPU core.
MAX_EXPLICIT_LENGTH = 128
# Sequences join a block while padding them to its longest wastes at most this share of the block.
MAX_PADDING = 0.25


@dataclass(frozen=True)
class AttentionBlock:
    """Sequences that are attended to in one call, padded on the right to the longest.

    `index` int64 [B, L] picks each sequence's tokens from the packed batch (padding repeats the last token);
    `valid` int64 [n] are the positions in the flattened [B * L] result that are real, in packed order;
    `start`, `stop`: the block's stretch of the packed batch.
    """

    index: Tensor
    valid: Tensor | None  # None: no padding
    start: int
    stop: int


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """What the model's layers need to know of a packed batch. Sequences are sorted by length.

    `qkv_format` stays "sbhd", so that megatron's attention leaves q, k, v as [T, 1, heads, dim] and applies the
    rotary angles token by token instead of in a loop over sequences.
    """

    qkv_format: str = "sbhd"
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # int64 [T]
    blocks: tuple[AttentionBlock, ...] = ()


def pack(lengths: list[int], device: torch.device) -> PackedSequences:
    """Describe sequences of these `lengths` (in tokens, each at least 1) that lie one after the other."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    blocks, first, start = [], 0, 0
    for i in range(1, len(lengths) + 1):
        if i < len(lengths):
            block = lengths[first : i + 1]
            if 1 - sum(block) / (max(block) * len(block)) <= MAX_PADDING:
                continue
        block = lengths[first:i]
        blocks.append(_block(block, start, device))
        first, start = i, start + sum(block)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    return PackedSequences(
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        blocks=tuple(blocks),
    )


def _block(lengths: list[int], start: int, device: torch.device) -> AttentionBlock:
    length = torch.tensor(lengths)
    begin = start + length.cumsum(0) - length
    longest = int(length.max())
    step = torch.arange(longest)
    index = begin[:, None] + step.clamp(max=longest - 1).minimum(length[:, None] - 1)
    real = step < length[:, None]
    valid = None if bool(real.all()) else real.flatten().nonzero().flatten().to(device)
    return AttentionBlock(index.to(device), valid, start, start + int(length.sum()))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale + causal mask) v, with each KV head serving heads / KV heads query heads.

    Args:
        query: [B, heads, L, dim]; key and value: [B, KV heads, L, dim].
        scale: 1 / sqrt(dim) where None.

    Returns:
        [B, heads, L, dim].
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    if length > MAX_EXPLICIT_LENGTH:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=heads != groups
        )
    grouped = query.reshape(batch, groups, -1, dim)  # the query heads of a group, one after the other
    scores = (grouped @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores.unflatten(2, (-1, length)) * (dim**-0.5 if scale is None else scale)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype)
    attended: Tensor = weights.flatten(2, 3) @ value
    return attended.view(batch, heads, length, dim)


class PackedCoreAttention(torch.nn.Module):
    """Causal grouped-query attention within each packed sequence."""

    def __init__(
        self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, 1, heads, dim]; key and value: [T, 1, KV heads, dim].
            packed_seq_params: where the sequences lie.

        Returns:
            [T, 1, heads * dim].
        """
        outputs = []
        for block in packed_seq_params.blocks:
            q, k, v = (self._pick(x[:, 0], block) for x in (query, key, value))
            out = causal_attention(q, k, v, self.scale).transpose(1, 2).flatten(0, 1)  # [B * L, heads, dim]
            outputs.append(out if block.valid is None else out.index_select(0, block.valid))
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.flatten(1)[:, None]

    @staticmethod
    def _pick(x: Tensor, block: AttentionBlock) -> Tensor:
        """[T, heads, dim] -> the block's [B, heads, L, dim]."""
        batch, length = block.index.shape
        unpadded = block.valid is None  # then the block is one stretch of the batch, and needs no copy
        picked = x[block.start : block.stop] if unpadded else x.index_select(0, block.index.flatten())
        return picked.view(batch, length, *x.shape[1:]).transpose(1, 2)


class PackedRotary(torch.nn.Module):
    """Rotary angles of explicit positions.

    megatron asks for a sequence length first and hands it to `forward`; the positions of the packed batch travel
    in its place, so the module keeps no state between batches.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.inverse_frequency = 1.0 / base**exponent  # a plain attribute: bfloat16() must not round it

    def get_rotary_seq_len(
        self, context: Any, decoder: Any, decoder_input: Any, config: Any, packed: PackedSequences
    ) -> Tensor:
        """The positions, int64 [T], as the "length" that `forward` gets."""
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles [T, 1, 1, head_dim] in fp32."""
        angles = positions.float()[:, None] * self.inverse_frequency.to(positions.device)
        return torch.cat([angles, angles], -1)[:, None, None]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that marks its weight for the gradient reduction of sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
