"""What a push needs of the way on which buckets travel."""

from typing import Literal, Protocol

from torch import Tensor

Way = Literal["broadcast", "delta", "same_host"]
"""How buckets travel: whole, as what changed since the last push, or through memory that two processes share."""


class Channel(Protocol):
    """A way from one trainer rank to the workers of a `sync.wire.Group`."""

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """Begins to send or to receive `buffer`, after what was begun before; returns the bytes that travel.

        It fails after `timeout` seconds. Raises RuntimeError if the channel is broken.
        """

    def done(self) -> bool:
        """Whether all that was begun has ended, well or not."""

    def wait(self) -> None:
        """Waits for all that was begun; RuntimeError if a peer is gone or it took too long."""

    def close(self) -> None:
        """Leaves the channel. Peers that wait for this process get an error."""
