"""Attention and norms for machines without Transformer Engine.

Packed sequences lie one after the other in a batch of one: hidden states are [T, 1, H]. No T x T mask ever exists:
sequences of similar length are attended to together, each only within itself.

With context parallelism (CP) every sequence is cut into 2 * CP chunks, and rank r holds chunks r and 2 * CP - 1 - r of
each: an early one, which sees few keys, and a late one, which sees many, so that all ranks have equal work. A rank's
queries attend to the keys and values of all ranks, which are gathered.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Up to this length the scores are small enough to be written out, which is faster than torch's fused kernel where
# sequences are short: 11 ms against 56 ms forward and backward at 55 tokens in bf16 on one CPU core.
MAX_EXPLICIT_LENGTH = 128
# Sequences join a block while padding them to its longest wastes at most this share of the block.
MAX_PADDING = 0.25
# Where queries are not the first tokens of their sequences, so many of each sequence meet the keys before them in one
# call: its mask has this many rows, which bounds memory, and every call reads its keys anew, which costs time.
QUERY_ROWS = 512


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


@dataclass(frozen=True)
class ContextBlock:
    """Sequences of which one rank of a context-parallel group attends to its two chunks in two calls.

    C: the longest sequence's chunk; L = 2 * CP * C. Padding repeats the last token of a chunk or sequence.

    `query` int64 [2, B, C] picks the chunks' tokens from those of this rank;
    `positions` int64 [2, B, C] are their places in their sequences ([2, 1, C] where all are equally long);
    `key` int64 [B, L] picks the sequences from the gathered tokens of all ranks;
    `chunks`: which of its 2 * CP chunks this rank has of every sequence.
    """

    query: Tensor
    positions: Tensor
    key: Tensor
    chunks: tuple[int, int]


@dataclass(frozen=True)
class ContextPlan:
    """What one rank of a context-parallel group computes.

    `order` int64 [T / CP] picks this rank's tokens, in their order, from the blocks' results put one after the other.
    """

    blocks: tuple[ContextBlock, ...]
    order: Tensor


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """What the model's layers need to know of a packed batch. Sequences are sorted by length.

    `cu_seqlens_q`, `cu_seqlens_kv` and `max_seqlen_*` describe whole sequences; all else is this rank's part of them.
    `qkv_format` stays "sbhd", so that megatron's attention leaves q, k, v as [T, 1, heads, dim] and applies the
    rotary angles token by token instead of in a loop over sequences.
    """

    qkv_format: str = "sbhd"
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # int64 [T / CP]
    blocks: tuple[AttentionBlock, ...] = ()  # without context parallelism
    context: ContextPlan | None = None  # with it


def pack(lengths: list[int], device: torch.device, *, cp_size: int = 1, cp_rank: int = 0) -> PackedSequences:
    """Describe sequences that lie one after the other.

    Args:
        lengths: tokens of each whole sequence, at least 1; with context parallelism a multiple of 2 * cp_size.
        device: where the tensors go.
        cp_size: context-parallel size.
        cp_rank: which part of every sequence this rank holds: `local_index` says which.

    Raises:
        ValueError: if a length does not divide into 2 * cp_size chunks.
    """
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    if cp_size > 1:
        positions = positions[local_index(lengths, cp_size, cp_rank)]
    return PackedSequences(
        cu_seqlens_q=cu_seqlens.to(device),
        cu_seqlens_kv=cu_seqlens.to(device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        blocks=_attention_blocks(lengths, device) if cp_size == 1 else (),
        context=_context_plan(lengths, cp_size, cp_rank, device) if cp_size > 1 else None,
    )


def local_index(lengths: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Which tokens of a packed batch a rank holds, in its order: int64 [T / cp_size].

    Of each sequence, cut into 2 * cp_size chunks, these are chunk `cp_rank` and then chunk 2 * cp_size - 1 - `cp_rank`,
    as Transformer Engine and megatron cut them.

    Raises:
        ValueError: if a length does not divide into 2 * cp_size chunks.
    """
    if cp_size == 1:
        return torch.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        if length % (2 * cp_size):
            raise ValueError(f"a sequence of {length} tokens does not divide into 2 x {cp_size} chunks")
        size = length // (2 * cp_size)
        parts += [start + chunk * size + torch.arange(size) for chunk in _chunks(cp_size, cp_rank)]
        start += length
    return torch.cat(parts)


def _chunks(cp_size: int, cp_rank: int) -> tuple[int, int]:
    return cp_rank, 2 * cp_size - 1 - cp_rank


def _attention_blocks(lengths: list[int], device: torch.device) -> tuple[AttentionBlock, ...]:
    """Put sequences of similar length, which lie side by side, into one block."""
    blocks, first, start = [], 0, 0
    for i in range(1, len(lengths) + 1):
        if i < len(lengths):
            block = lengths[first : i + 1]
            if 1 - sum(block) / (max(block) * len(block)) <= MAX_PADDING:
                continue
        block = lengths[first:i]
        blocks.append(_block(block, start, device))
        first, start = i, start + sum(block)
    return tuple(blocks)


def _block(lengths: list[int], start: int, device: torch.device) -> AttentionBlock:
    length = torch.tensor(lengths)
    begin = start + length.cumsum(0) - length
    longest = int(length.max())
    step = torch.arange(longest)
    index = begin[:, None] + step.clamp(max=longest - 1).minimum(length[:, None] - 1)
    real = step < length[:, None]
    valid = None if bool(real.all()) else real.flatten().nonzero().flatten().to(device)
    return AttentionBlock(index.to(device), valid, start, start + int(length.sum()))


def _context_plan(lengths: list[int], cp_size: int, cp_rank: int, device: torch.device) -> ContextPlan:
    """The same blocks of sequences as on one rank, each reduced to this rank's queries."""
    gathered = torch.cat([local_index(lengths, cp_size, rank) for rank in range(cp_size)])
    place = gathered.argsort()  # of each token of the packed batch among the gathered ones
    chunks = torch.tensor(_chunks(cp_size, cp_rank))[:, None, None]
    blocks, picked, real = [], [], []
    for whole in _attention_blocks(lengths, torch.device("cpu")):
        first, last = whole.index[:, :1], whole.index[:, -1:]  # tokens of the packed batch, [B, 1]
        size = (last - first + 1) // (2 * cp_size)  # of a chunk
        step = torch.arange(int(size.max()))
        inside = step.minimum(size - 1)  # place in the chunk, [B, C]
        query = first // cp_size + torch.arange(2)[:, None, None] * size + inside
        positions = chunks * size + inside
        if whole.valid is None:
            positions = positions[:, :1]
        picked.append(query.flatten())
        real.append((step < size).expand(query.shape).flatten())
        index = (query.to(device), positions.to(device), place[whole.index].to(device))
        blocks.append(ContextBlock(*index, chunks=_chunks(cp_size, cp_rank)))
    rows = torch.cat(real).nonzero().flatten()
    order = rows[torch.cat(picked)[rows].argsort()]
    return ContextPlan(tuple(blocks), order.to(device))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale + causal mask) v, with each KV head serving heads / KV heads query heads.

    Args:
        query: [B, heads, L, dim]; key: [B, KV heads, L, dim]; value: [B, KV heads, L, value dim].
        scale: 1 / sqrt(dim) where None.

    Returns:
        [B, heads, L, value dim].
    """
    length = query.shape[2]
    if length > MAX_EXPLICIT_LENGTH:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return _explicit_attention(query, key, value, future, scale)


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float | None) -> Tensor:
    """Attention with the scores written out. `hidden` bool, [queries, keys] or [B, 1, 1, queries, keys]."""
    batch, heads, length, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, dim)  # the query heads of a group, one after the other
    scores = (grouped @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores.unflatten(2, (-1, length)) * (dim**-0.5 if scale is None else scale)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(value.dtype)
    attended: Tensor = weights.flatten(2, 3) @ value
    return attended.view(batch, heads, length, value.shape[-1])


def chunk_attention(
    query: Tensor, key_value: Tensor, positions: Tensor, chunk: int, scale: float | None = None
) -> Tensor:
    """Causal attention of one chunk of each sequence to the chunks up to and including it.

    Args:
        query: [B, heads, C, dim].
        key_value: [B, KV heads, L, dim + value dim], each key followed by its value; at least fp32, so that the
            gradients of many calls and ranks add up in it. Attention itself is computed in the precision of `query`.
        positions: int64 [B or 1, C], the place of each query among the L keys; all of them below (chunk + 1) * C.
        chunk: the chunk's number.
        scale: 1 / sqrt(dim) where None.

    Returns:
        [B, heads, C, value dim].
    """
    size = query.shape[2]
    outputs = []
    for start in range(0, size, QUERY_ROWS):
        stop = min(start + QUERY_ROWS, size)
        seen = key_value[:, :, : chunk * size + stop]
        arguments = (query[:, :, start:stop], seen, positions[:, start:stop], scale)
        # What would be kept for the backward pass is above all the mask: as many elements as queries times keys.
        outputs.append(checkpoint(_prefix_attention, *arguments, use_reentrant=False, preserve_rng_state=False))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _prefix_attention(query: Tensor, key_value: Tensor, positions: Tensor, scale: float | None) -> Tensor:
    """Attention to the keys at each query's position and before."""
    key, value = key_value.to(query.dtype).tensor_split([query.shape[-1]], -1)
    seen = torch.arange(key.shape[2], device=query.device) <= positions[:, None, :, None]  # [B or 1, 1, C, keys]
    if key.shape[2] <= MAX_EXPLICIT_LENGTH:
        return _explicit_attention(query, key, value, ~seen[:, None], scale)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


class _GatherContext(torch.autograd.Function):
    """Gather the tokens of a context-parallel group: [T / CP, ...] -> [T, ...], rank after rank, in at least fp32.

    Backward adds up what the ranks found for a token, in that precision, and leaves each rank its own tokens' sums.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.dtype = group, local.dtype
        gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.to(torch.promote_types(local.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        local = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local.to(ctx.dtype), None


class PackedCoreAttention(torch.nn.Module):
    """Causal grouped-query attention within each packed sequence.

    `pg_collection.cp` is the context-parallel group; without a collection it is the one that megatron was set up with.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.group = (
            pg_collection.cp
            if pg_collection is not None
            else parallel_state.get_context_parallel_group(check_initialized=False)
        )

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
            query: [T, 1, heads, dim]; key: [T, 1, KV heads, dim]; value: [T, 1, KV heads, value dim]; or all without
                the 1. With context parallelism T counts this rank's tokens, and all ranks of the group must call.
            packed_seq_params: where the sequences lie.

        Returns:
            [T, 1, heads * value dim].
        """
        query, key, value = (x.view(-1, *x.shape[-2:]) for x in (query, key, value))
        if packed_seq_params.context is not None:
            return self._context_parallel(query, key, value, packed_seq_params.context)
        outputs = []
        for block in packed_seq_params.blocks:
            q, k, v = (self._pick(x, block) for x in (query, key, value))
            out = causal_attention(q, k, v, self.scale).transpose(1, 2).flatten(0, 1)  # [B * L, heads, value dim]
            outputs.append(out if block.valid is None else out.index_select(0, block.valid))
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.flatten(1)[:, None]

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, plan: ContextPlan) -> Tensor:
        """`forward` for this rank's [T / CP, heads, dim] queries and the keys and values of all ranks."""
        local = torch.cat([key, value], -1)
        gathered: Tensor = _GatherContext.apply(local, self.group)  # type: ignore[no-untyped-call]
        outputs = []
        for block in plan.blocks:
            key_value = _take(gathered, block.key)
            for index, positions, chunk in zip(block.query, block.positions, block.chunks, strict=True):
                out = chunk_attention(_take(query, index), key_value, positions, chunk, self.scale)
                outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B * C, heads, value dim]
        return torch.cat(outputs).index_select(0, plan.order).flatten(1)[:, None]

    @staticmethod
    def _pick(x: Tensor, block: AttentionBlock) -> Tensor:
        """[T, heads, dim] -> the block's [B, heads, L, dim]."""
        batch, length = block.index.shape
        unpadded = block.valid is None  # then the block is one stretch of the batch, and needs no copy
        picked = x[block.start : block.stop] if unpadded else x.index_select(0, block.index.flatten())
        return picked.view(batch, length, *x.shape[1:]).transpose(1, 2)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """[T, heads, dim], [B, L] -> [B, heads, L, dim]."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that marks its weight for the gradient reduction of sequence parallelism.

    Where norms are centred on zero it multiplies by 1 + weight, in at least fp32 like transformers' Gemma.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        if not self.zero_centered:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(dtype)
        return torch.nn.functional.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps).to(x.dtype)
