"""Delta pushes: a bit for every value and the values that changed, against a copy of the last push on both sides.

Bytes are compared, not numbers (NaN and -0.0 are values like others), so that what is put together is what was sent,
bit by bit. Only torch and the standard library: servers import it, too.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_megatron.sync.channel import Channel
from dapo_megatron.sync.wire import ITEM_BYTES, Bucket, aligned

PLAIN = -1  # instead of the number of changed values: all of the stretch's bytes follow
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Eight bytes of 0 or 1, read as one number and multiplied by this, have their bits side by side in the highest byte.
_GATHER_BITS = 0x0102040810204080


class DeltaSender:
    """A channel that sends what changed in each of `buckets`, which come again in the same order with every push."""

    def __init__(self, channel: Channel, buckets: Sequence[Bucket]) -> None:
        self._channel, self._encoder = channel, DeltaEncoder()
        self._next = cycle(enumerate(buckets))

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """Begins to send the next bucket, from a uint8 [bucket.nbytes]; returns the bytes that travel."""
        counts, payload = self._encoder.encode(*next(self._next), buffer)
        header = torch.tensor(counts, dtype=torch.int64, device=buffer.device)
        return self._channel.start_broadcast(header, timeout) + self._channel.start_broadcast(payload, timeout)

    def done(self) -> bool:
        """Whether it has arrived, or failed."""
        return self._channel.done()

    def wait(self) -> None:
        """Waits until it has arrived; RuntimeError as in `Channel`."""
        self._channel.wait()

    def close(self) -> None:
        """Leaves the channel."""
        self._channel.close()


class _Begun(NamedTuple):
    """A bucket on its way."""

    number: int
    bucket: Bucket
    header: Tensor
    buffer: Tensor
    timeout: float


class DeltaReceiver:
    """A worker's end of a `DeltaSender`: its buckets arrive whole."""

    def __init__(self, channel: Channel, buckets: Sequence[Bucket]) -> None:
        self._channel, self._decoder = channel, DeltaDecoder()
        self._next = cycle(enumerate(buckets))
        self._begun: _Begun | None = None

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """Begins to receive the next bucket into a uint8 [bucket.nbytes]."""
        number, bucket = next(self._next)
        header = torch.empty(len(bucket.stretches), dtype=torch.int64, device=buffer.device)
        self._begun = _Begun(number, bucket, header, buffer, timeout)
        return self._channel.start_broadcast(header, timeout)

    def done(self) -> bool:
        """Whether nothing was begun that `wait` has not waited for."""
        return self._begun is None

    def wait(self) -> None:
        """Waits until the bucket is complete; RuntimeError as in `Channel`."""
        if self._begun is None:
            return
        number, bucket, header, buffer, timeout = self._begun
        self._begun = None
        self._channel.wait()
        counts = header.tolist()
        payload = buffer if all_plain(counts) else buffer.new_empty(payload_bytes(bucket, counts))
        self._channel.start_broadcast(payload, timeout)
        self._channel.wait()
        self._decoder.decode(number, bucket, counts, payload, buffer)

    def close(self) -> None:
        """Leaves the channel."""
        self._channel.close()


class DeltaEncoder:
    """Remembers, in host memory, the bytes of each bucket that were sent last."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}

    def encode(self, number: int, bucket: Bucket, buffer: Tensor) -> tuple[list[int], Tensor]:
        """What to send instead of `buffer`, which is kept for the next push.

        Args:
            number: of the bucket in the push.
            bucket: what lies in the buffer.
            buffer: uint8 [bucket.nbytes], any device.

        Returns:
            For each stretch the number of changed values or PLAIN, and the payload: uint8 [`payload_bytes`], or
            `buffer` itself if all are PLAIN.
        """
        last = self._last.get(number)
        if last is None:
            self._last[number] = _host_copy(buffer)
            return [PLAIN] * len(bucket.stretches), buffer
        new, old = _stretches(bucket, buffer), _stretches(bucket, last.to(buffer.device))
        masks = [now != before for now, before in zip(new, old, strict=True)]
        changed = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
        counts = [
            count if sum(_parts(*size, count)) < sum(_parts(*size, PLAIN)) else PLAIN
            for size, count in zip(_sizes(bucket), changed, strict=True)
        ]
        last.copy_(buffer)
        if all_plain(counts):
            return counts, buffer
        payload = buffer.new_zeros(payload_bytes(bucket, counts))
        places = _places(bucket, counts, payload)
        for words, mask, (bits, values) in zip(new, masks, places, strict=True):
            if bits is None:
                values.copy_(words)
            else:
                bits.copy_(pack_bits(mask))
                values.copy_(words[mask])
        return counts, payload


class DeltaDecoder:
    """Remembers, in host memory, each bucket as the last push left it."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}

    def decode(self, number: int, bucket: Bucket, counts: Sequence[int], payload: Tensor, buffer: Tensor) -> None:
        """Makes `buffer`, uint8 [bucket.nbytes], what `encode` was given; the other arguments are what it returned.

        Raises:
            RuntimeError: if the sender counts on a push that this worker did not get.
        """
        last = self._last.get(number)
        if all_plain(counts):
            buffer.copy_(payload)
        elif last is None:
            raise RuntimeError(f"changes of bucket {number} came before the bucket itself")
        else:
            buffer.copy_(last)
            places = _places(bucket, counts, payload)
            for words, (bits, values) in zip(_stretches(bucket, buffer), places, strict=True):
                if bits is None:
                    words.copy_(values)
                else:
                    words.masked_scatter_(unpack_bits(bits, words.numel()), values)
        self._last[number] = _host_copy(buffer) if last is None else last.copy_(buffer)


def all_plain(counts: Sequence[int]) -> bool:
    """Whether the payload is the bucket itself."""
    return all(count == PLAIN for count in counts)


def payload_bytes(bucket: Bucket, counts: Sequence[int]) -> int:
    """Size of a payload with these numbers of changed values, not all PLAIN."""
    return sum(sum(_parts(*size, count)) for size, count in zip(_sizes(bucket), counts, strict=True))


def pack_bits(mask: Tensor) -> Tensor:
    """Eight values of a bool [N] in each byte, the first in the lowest bit: uint8 [ceil(N / 8)]."""
    padded = torch.nn.functional.pad(mask, (0, -mask.numel() % 8))
    return ((padded.view(torch.int64) * _GATHER_BITS) >> 56).to(torch.uint8)


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    """The bool [numel] that `pack_bits` was given."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(1) >> shifts) & 1).view(-1)[:numel].bool()


def _host_copy(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer, device="cpu").copy_(buffer)


def _sizes(bucket: Bucket) -> list[tuple[int, int]]:
    """Number of values of each stretch, and bytes of one value."""
    sizes = (ITEM_BYTES[stretch.dtype] for stretch in bucket.stretches)
    return [(stretch.nbytes // size, size) for stretch, size in zip(bucket.stretches, sizes, strict=True)]


def _stretches(bucket: Bucket, buffer: Tensor) -> list[Tensor]:
    """The stretches in a bucket's buffer, as integers of their values' size: [values]."""
    return [
        buffer[offset : offset + numel * itemsize].view(_WORDS[itemsize])
        for (numel, itemsize), offset in zip(_sizes(bucket), bucket.offsets, strict=True)
    ]


def _parts(numel: int, itemsize: int, count: int) -> tuple[int, int]:
    """Bytes that the bits and the values of a stretch take in a payload."""
    return (0, aligned(numel * itemsize)) if count == PLAIN else (aligned(-(-numel // 8)), aligned(count * itemsize))


def _places(bucket: Bucket, counts: Sequence[int], payload: Tensor) -> list[tuple[Tensor | None, Tensor]]:
    """Where the bits, if there are any, and the values of each stretch lie in a payload."""
    places: list[tuple[Tensor | None, Tensor]] = []
    start = 0
    for (numel, itemsize), count in zip(_sizes(bucket), counts, strict=True):
        bits_size, values_size = _parts(numel, itemsize, count)
        bits = None if count == PLAIN else payload[start : start + -(-numel // 8)]
        start += bits_size
        size = itemsize * (numel if count == PLAIN else count)
        places.append((bits, payload[start : start + size].view(_WORDS[itemsize])))
        start += values_size
    return places
