"""Delta pushes put together exactly the bytes that were sent, and are never longer than plain ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.sync.delta import (
    PLAIN,
    DeltaDecoder,
    DeltaEncoder,
    DeltaReceiver,
    DeltaSender,
    all_plain,
    pack_bits,
    payload_bytes,
    unpack_bits,
)
from dapo_megatron.sync.wire import Bucket, Group, Stretch

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def bucket_of(*parts: tuple[str, int]) -> Bucket:
    """A bucket with a vector of each (dtype, length)."""
    stretches = (Stretch(f"t{i}", dtype, (length,), 0, 0, length) for i, (dtype, length) in enumerate(parts))
    return Bucket(Group(0, (0,)), tuple(stretches))


def view(bucket: Bucket, buffer: Tensor, number: int) -> Tensor:
    """A stretch of a buffer, in its dtype."""
    stretch, offset = bucket.stretches[number], bucket.offsets[number]
    return buffer[offset : offset + stretch.nbytes].view(getattr(torch, stretch.dtype))


def random_bytes(nbytes: int, generator: torch.Generator) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def travel(encoder: DeltaEncoder, decoder: DeltaDecoder, bucket: Bucket, buffer: Tensor) -> tuple[list[int], Tensor]:
    counts, payload = encoder.encode(0, bucket, buffer)
    assert payload.numel() == (bucket.nbytes if all_plain(counts) else payload_bytes(bucket, counts))
    arrived = torch.full_like(buffer, 99)
    decoder.decode(0, bucket, counts, payload.clone(), arrived)
    return counts, arrived


def same(bucket: Bucket, one: Tensor, other: Tensor) -> bool:
    """Equality of all stretches' bytes; what lies between them does not matter."""
    spans = [
        (offset, offset + stretch.nbytes) for stretch, offset in zip(bucket.stretches, bucket.offsets, strict=True)
    ]
    return all(torch.equal(one[start:stop], other[start:stop]) for start, stop in spans)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 70)), min_size=1, max_size=6),
    shares=st.lists(st.sampled_from([0.0, 0.03, 0.5, 1.0]), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_every_push_arrives_bit_by_bit(parts: list[tuple[str, int]], shares: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bucket, encoder, decoder = bucket_of(*parts), DeltaEncoder(), DeltaDecoder()
    buffer = random_bytes(bucket.nbytes, generator)
    for share in [1.0, *shares]:
        change = torch.rand(bucket.nbytes, generator=generator) < share
        buffer = torch.where(change, random_bytes(bucket.nbytes, generator), buffer)
        counts, arrived = travel(encoder, decoder, bucket, buffer.clone())
        assert same(bucket, arrived, buffer)
        assert payload_bytes(bucket, counts) <= sum(-(-stretch.nbytes // 16) * 16 for stretch in bucket.stretches)


@given(st.lists(st.booleans(), max_size=100))
def test_bits_are_packed_eight_to_a_byte(mask: list[bool]) -> None:
    packed = pack_bits(torch.tensor(mask, dtype=torch.bool))
    assert packed.tolist() == [
        sum(bit << place for place, bit in enumerate(mask[i : i + 8])) for i in range(0, len(mask), 8)
    ]
    assert unpack_bits(packed, len(mask)).tolist() == mask


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_what_changed_travels(dtype: str) -> None:
    bucket, encoder, decoder = bucket_of((dtype, 1000), ("float32", 9)), DeltaEncoder(), DeltaDecoder()
    buffer = random_bytes(bucket.nbytes, torch.Generator().manual_seed(0))
    assert travel(encoder, decoder, bucket, buffer)[0] == [PLAIN, PLAIN]
    values = view(bucket, buffer, 0).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view(bucket, buffer, 0).itemsize]
    )
    values[torch.tensor([0, 7, 8, 999])] ^= 1
    counts, arrived = travel(encoder, decoder, bucket, buffer)
    assert counts == [4, 0]
    assert payload_bytes(bucket, counts) == 128 + 16 + 16  # 125 bytes of bits, up to 16 of values, bits of the rest
    assert same(bucket, arrived, buffer)


def test_values_are_compared_by_their_bits() -> None:
    bucket, encoder, decoder = bucket_of(("float32", 64)), DeltaEncoder(), DeltaDecoder()
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    values = view(bucket, buffer, 0)
    values[:32] = float("nan")
    travel(encoder, decoder, bucket, buffer)
    values[40] = -0.0  # equals what it was
    values.view(torch.int32)[3] += 1  # another NaN; all others are no changes
    counts, arrived = travel(encoder, decoder, bucket, buffer)
    assert counts == [2]
    assert same(bucket, arrived, buffer)


def test_plain_bytes_travel_where_they_are_shorter() -> None:
    bucket, encoder, decoder = bucket_of(("bfloat16", 800), ("bfloat16", 800)), DeltaEncoder(), DeltaDecoder()
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    travel(encoder, decoder, bucket, buffer)
    view(bucket, buffer, 0)[:] = 1
    view(bucket, buffer, 1)[:100] = 1
    counts, arrived = travel(encoder, decoder, bucket, buffer)
    assert counts == [PLAIN, 100]
    assert same(bucket, arrived, buffer)


def test_memories_are_not_the_buffers() -> None:
    """The sender fills its buffer again, and vLLM's layers keep parts of what they are given."""
    bucket, encoder, decoder = bucket_of(("float32", 100)), DeltaEncoder(), DeltaDecoder()
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    arrived = travel(encoder, decoder, bucket, buffer)[1]
    for value in (1, 2, 0):  # the last is what it was at first
        arrived.fill_(77)
        view(bucket, buffer, 0)[5] = value
        counts, arrived = travel(encoder, decoder, bucket, buffer)
        assert counts == [1]
        assert same(bucket, arrived, buffer)


def test_changes_without_their_base_are_refused() -> None:
    bucket, encoder = bucket_of(("float32", 100)), DeltaEncoder()
    buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    encoder.encode(0, bucket, buffer)
    counts, payload = encoder.encode(0, bucket, buffer)
    with pytest.raises(RuntimeError, match="changes of bucket 7 came before the bucket itself"):
        DeltaDecoder().decode(7, bucket, counts, payload, buffer)


class Pipe:
    """A channel within this process: what one end sends, the other receives when it waits."""

    def __init__(self) -> None:
        self.travelling: list[Tensor] = []
        self.waiting: list[Tensor] = []
        self.closed = 0

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        self.travelling.append(buffer.clone())
        return buffer.nbytes

    def done(self) -> bool:
        return not self.travelling

    def wait(self) -> None:
        raise RuntimeError("gone")

    def close(self) -> None:
        self.closed += 1


class Outlet(Pipe):
    """The other end of a pipe."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe = pipe

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        self.waiting.append(buffer)
        return buffer.nbytes

    def wait(self) -> None:
        for buffer in self.waiting:
            buffer.copy_(self.pipe.travelling.pop(0))
        self.waiting = []


def test_channels_carry_push_after_push() -> None:
    """Two buckets a push; the second end starts each before it has it, as workers do."""
    buckets = [bucket_of(("bfloat16", 300), ("float32", 5)), bucket_of(("bfloat16", 1000))]
    pipe = Pipe()
    outlet = Outlet(pipe)
    sender, receiver = DeltaSender(pipe, buckets), DeltaReceiver(outlet, buckets)
    generator = torch.Generator().manual_seed(0)
    weights = [random_bytes(bucket.nbytes, generator) for bucket in buckets]
    for push, due in enumerate([[8 * 2 + 628, 8 + 2000], [16 + 48 + 16 + 16, 8 + 128 + 16]]):
        for number, bucket in enumerate(buckets):
            arena, arrived = weights[number].clone(), torch.empty_like(weights[number])
            receiver.start_broadcast(arrived, 1)
            assert not receiver.done()
            assert sender.start_broadcast(arena, 1) == due[number]
            assert not sender.done()
            receiver.wait()
            assert receiver.done()
            assert sender.done()
            assert same(bucket, arrived, weights[number])
            view(bucket, weights[number], 0).view(torch.int16)[push] ^= 1
    with pytest.raises(RuntimeError, match="gone"):
        sender.wait()
    sender.close()
    receiver.close()
    assert (pipe.closed, outlet.closed) == (1, 1)
