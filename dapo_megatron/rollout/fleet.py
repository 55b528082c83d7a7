"""Many servers as one: where a group is generated, and what happens when a request fails."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from dapo_megatron.rollout.client import Generated, RequestError
from dapo_megatron.rollout.requests import Sampling

logger = logging.getLogger(__name__)


class Client(Protocol):
    """What the fleet needs of a server; `dapo_megatron.rollout.client.ServerClient` is the real one."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generated:
        """One answer. Raises RequestError."""
        ...


class Fleet:
    """Sends requests to the servers behind `clients`.

    A failed request is sent again up to `retries` times, to another server where there is one, after a pause (seconds)
    that doubles each time.
    """

    def __init__(self, clients: Sequence[Client], retries: int, pause: float = 0.5):
        self._clients = clients
        self._retries = retries
        self._pause = pause
        self._placed = [0] * len(clients)

    @contextmanager
    def place(self, answers: int) -> Iterator[int]:
        """The server with the fewest answers placed on it, counting these `answers` until the block is left.

        The answers of one group belong on one server: they share their prompt's prefix cache.
        """
        server = min(range(len(self._placed)), key=self._placed.__getitem__)
        self._placed[server] += answers
        try:
            yield server
        finally:
            self._placed[server] -= answers

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, server: int) -> Generated:
        """One whole answer, from `server` if that works.

        Raises:
            RequestError: the last one, when every attempt failed.
        """
        for attempt in range(self._retries + 1):
            try:
                reply = await self._clients[server].generate(prompt_ids, sampling, f"{request_id}-{attempt}")
                return _checked(reply)
            except RequestError as error:
                logger.warning("attempt %d of %d: %s", attempt + 1, self._retries + 1, error)
                if attempt == self._retries:
                    raise
            await asyncio.sleep(self._pause * 2**attempt)
            server = (server + 1) % len(self._clients)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _checked(reply: Generated) -> Generated:
    """Refuse what cannot be trained on: an answer that was cut off from outside, or log-probs that do not match it."""
    if reply.finish_reason not in ("stop", "length"):
        raise RequestError(f"the server ended an answer with {reply.finish_reason!r}")
    if len(reply.token_ids) != len(reply.log_probs):
        raise RequestError(f"{len(reply.token_ids)} tokens came with {len(reply.log_probs)} log-probs")
    return reply
