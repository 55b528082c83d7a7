"""Attention over packed sequences, rotary angles and norms."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.trainer import attention as attention_module
from dapo_megatron.trainer.attention import (
    MAX_EXPLICIT_LENGTH,
    MAX_PADDING,
    PackedCoreAttention,
    RMSNorm,
    causal_attention,
    chunk_attention,
    local_index,
    pack,
)

CPU = torch.device("cpu")


def naive(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One head, one query at a time, [heads, L, dim]: q attends to the keys up to its own place."""
    heads, length, _ = query.shape
    share = heads // key.shape[0]
    rows = [
        (query[h, i] @ key[h // share, : i + 1].T * scale).softmax(-1) @ value[h // share, : i + 1]
        for h in range(heads)
        for i in range(length)
    ]
    return torch.stack(rows).view(heads, length, value.shape[-1])


def random_qkv(
    batch: int, heads: int, kv_heads: int, length: int, dtype: torch.dtype, *, value_dim: int = 4
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, h, length, dim) for h, dim in ((heads, 4), (kv_heads, 4), (kv_heads, value_dim))]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("length", [1, 2, MAX_EXPLICIT_LENGTH, MAX_EXPLICIT_LENGTH + 1])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("scale", "value_dim"), [(None, 4), (0.3, 3)])
def test_causal_attention_forward_and_backward(
    length: int, heads: int, kv_heads: int, scale: float | None, value_dim: int
) -> None:
    inputs = random_qkv(2, heads, kv_heads, length, torch.float64, value_dim=value_dim)
    expected = torch.stack([naive(*(x[b] for x in inputs), scale=scale or 0.5) for b in range(2)])  # 1 / sqrt(4)
    found = causal_attention(*inputs, scale=scale)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    for ours, reference in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_explicit_attention_equals_the_fused_kernel(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = random_qkv(2, 6, 2, MAX_EXPLICIT_LENGTH, dtype)
    fused = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = causal_attention(query, key, value)
    assert found.dtype == dtype
    torch.testing.assert_close(found, fused, atol=tolerance, rtol=tolerance)


def test_pack_places_sequences_one_after_the_other() -> None:
    packed = pack([2, 2, 3, 9], CPU)
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 2, 4, 7, 16]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 9
    assert packed.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, *range(9)]
    short, long = packed.blocks
    assert (short.start, short.stop) == (0, 7)
    assert short.index.tolist() == [[0, 1, 1], [2, 3, 3], [4, 5, 6]]  # padding repeats the last token
    assert short.valid is not None
    assert short.valid.tolist() == [0, 1, 3, 4, 6, 7, 8]
    assert (long.start, long.stop, long.valid) == (7, 16, None)
    assert long.index.tolist() == [list(range(7, 16))]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_blocks_cover_the_packed_batch_within_the_padding_limit(lengths: list[int]) -> None:
    lengths = sorted(lengths)
    packed = pack(lengths, CPU)
    covered = []
    for block in packed.blocks:
        flat = block.index.flatten()
        real = flat if block.valid is None else flat[block.valid]
        assert real.tolist() == list(range(block.start, block.stop))
        assert 1 - len(real) / len(flat) <= MAX_PADDING
        covered += real.tolist()
    assert covered == list(range(sum(lengths)))


def test_equal_lengths_share_one_block() -> None:
    assert len(pack([7] * 5, CPU).blocks) == 1


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([None, 0.7]))
def test_packed_attention_equals_attention_per_sequence(lengths: list[int], scale: float | None) -> None:
    lengths = sorted(lengths)
    total, heads, kv_heads, dim = sum(lengths), 4, 2, 4
    generator = torch.Generator().manual_seed(total)
    query, key, value = (
        torch.randn(total, 1, h, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)
    )
    attention = PackedCoreAttention(SimpleNamespace(), softmax_scale=scale)
    found = attention(query, key, value, packed_seq_params=pack(lengths, CPU))
    assert found.shape == (total, 1, heads * dim)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        expected = naive(*(x[part, 0].transpose(0, 1) for x in (query, key, value)), scale=scale or dim**-0.5)
        torch.testing.assert_close(found[part, 0], expected.transpose(0, 1).flatten(1))
        start += length


def test_packed_attention_gives_padding_no_gradient() -> None:
    lengths = [3, 4]
    inputs = [torch.randn(7, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    packed = PackedCoreAttention(SimpleNamespace())(*inputs, packed_seq_params=pack(lengths, CPU))
    separate = torch.cat(
        [
            PackedCoreAttention(SimpleNamespace())(*(x[part] for x in inputs), packed_seq_params=pack([length], CPU))
            for part, length in ((slice(0, 3), 3), (slice(3, 7), 4))
        ]
    )
    weights = torch.randn(packed.shape, dtype=torch.float64)
    for ours, reference in zip(
        torch.autograd.grad((packed * weights).sum(), inputs),
        torch.autograd.grad((separate * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference)


def test_local_index_takes_an_early_and_a_late_chunk() -> None:
    assert local_index([8, 16], 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert local_index([8, 16], 2, 1).tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(2, 5))
def test_ranks_share_the_tokens_and_the_work(chunks: list[int], cp_size: int) -> None:
    lengths = sorted(2 * cp_size * chunk for chunk in chunks)
    whole = pack(lengths, CPU)
    indices = [local_index(lengths, cp_size, rank) for rank in range(cp_size)]
    assert sorted(torch.cat(indices).tolist()) == list(range(sum(lengths)))
    parts = [pack(lengths, CPU, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    for index, part in zip(indices, parts, strict=True):
        assert part.positions.tolist() == whole.positions[index].tolist()
        assert part.cu_seqlens_q.tolist() == part.cu_seqlens_kv.tolist() == whole.cu_seqlens_q.tolist()
        assert part.max_seqlen_q == part.max_seqlen_kv == max(lengths)
    keys_seen = [int((part.positions + 1).sum()) for part in parts]
    assert len(set(keys_seen)) == 1


def test_sequence_that_does_not_divide_into_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 12 tokens does not divide into 2 x 4 chunks"):
        pack([8, 12], CPU, cp_size=4, cp_rank=1)


@pytest.mark.parametrize(("rows", "explicit"), [(512, 128), (3, 128), (3, 0), (512, 7)])
@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6), cp_size=st.integers(2, 3))
def test_ranks_together_attend_as_one(rows: int, explicit: int, lengths: list[int], cp_size: int) -> None:
    """Without processes: every rank gets the gathered keys and values by hand."""
    lengths = sorted(2 * cp_size * length for length in lengths)
    generator = torch.Generator().manual_seed(sum(lengths))
    query, key, value = inputs = [  # without a batch dimension and with smaller values, as latent attention's
        torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((4, 4), (2, 4), (2, 3))
    ]
    expected = PackedCoreAttention(SimpleNamespace())(*inputs, packed_seq_params=pack(lengths, CPU))
    indices = [local_index(lengths, cp_size, rank) for rank in range(cp_size)]
    gathered = torch.cat([key, value], -1)[torch.cat(indices)]
    found = torch.zeros_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "QUERY_ROWS", rows)
        patch.setattr(attention_module, "MAX_EXPLICIT_LENGTH", explicit)
        patch.setattr(attention_module, "_GatherContext", SimpleNamespace(apply=lambda local, group: gathered))
        for rank, index in enumerate(indices):
            packed = pack(lengths, CPU, cp_size=cp_size, cp_rank=rank)
            attended = PackedCoreAttention(SimpleNamespace())(
                query[index], key[index], value[index], packed_seq_params=packed
            )
            found = found.index_copy(0, index, attended)
        torch.testing.assert_close(found, expected)
        weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        for ours, reference in zip(
            torch.autograd.grad((found * weights).sum(), inputs),
            torch.autograd.grad((expected * weights).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("length", [8, 2 * MAX_EXPLICIT_LENGTH])
def test_chunk_attention_returns_the_precision_of_its_queries(length: int) -> None:
    query, key, value = random_qkv(1, 4, 2, length, torch.float32)
    half = length // 2
    positions = torch.arange(half, length)[None]
    key_value = torch.cat([key, value], -1)
    found = chunk_attention(query[:, :, half:].bfloat16(), key_value, positions, 1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), causal_attention(query, key, value)[:, :, half:], atol=3e-2, rtol=3e-2)
    found.float().sum().backward()
    assert key.grad is not None
    assert key.grad.dtype == torch.float32


def norm_config(*, sequence_parallel: bool = False, zero_centered: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        params_dtype=torch.float32, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=zero_centered
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm(sequence_parallel: bool) -> None:
    config = norm_config(sequence_parallel=sequence_parallel)
    norm = RMSNorm(config, 8, eps=1e-2)
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
    torch.testing.assert_close(norm(x), x / (x.square().mean() + 1e-2).sqrt() * torch.arange(8.0))
    assert norm.weight.sequence_parallel is sequence_parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rms_norm_around_zero(dtype: torch.dtype) -> None:
    """As transformers' Gemma: 1 + weight and the product are not rounded."""
    norm = RMSNorm(norm_config(zero_centered=True), 8, eps=1e-2).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.01, 0.02, 8))
    x = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double() / (x.double().square().mean() + 1e-2).sqrt() * (1 + norm.weight.double())
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), exact.to(dtype), rtol=2e-7 if dtype == torch.float32 else 0, atol=0)
