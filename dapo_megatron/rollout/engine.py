"""Answers from token ids to rewards: requests to servers and grading, in one process."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Self

from dapo_megatron.rollout.client import ABORT_GRACE, ServerClient
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.requests import AnswerTask, Generated, Sampling, Server
from dapo_megatron.types import Sample


class LocalEngine:
    """`requests.Engine` in this process: HTTP on its event loop, grading in threads beside it.

    `request_timeout` in seconds bounds each request; token ids are below `vocabulary`. Use it inside `async with`.
    """

    def __init__(self, grader: Grader, request_timeout: float, vocabulary: int) -> None:
        self._grader = grader
        self._request_timeout = request_timeout
        self._vocabulary = vocabulary
        self._clients: dict[Server, ServerClient] = {}  # one that was started again is another Server
        self._under_way: Counter[Server] = Counter()  # answers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is left: whoever asks for an answer waits for it, or cancels it."""

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        """A whole answer, graded; see `requests.Engine`."""
        generated = whole(task.so_far, task.sampling)
        if generated is None:
            async with self._client(server) as client:
                generated = await client.generate(
                    task.prompt.token_ids, task.sampling, task.request_id, task.so_far, task.version, on_tokens
                )
        return await asyncio.to_thread(self._grader.sample, generated, task.prompt, task.by_rule)

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None:
        """End requests, within `client.ABORT_GRACE` seconds; see `requests.Engine`."""
        if server in self._clients:
            await self._clients[server].abort(request_ids, ABORT_GRACE)

    def end_step(self, step: int) -> None:
        """See `Grader.end_step`."""
        self._grader.end_step(step)

    @contextlib.asynccontextmanager
    async def _client(self, server: Server) -> AsyncIterator[ServerClient]:
        """The client of all answers that are under way on a server. It ends with the last: the server may be gone."""
        self._under_way[server] += 1
        try:
            if server not in self._clients:
                client = ServerClient(server.url, server.token, self._request_timeout, self._vocabulary)
                self._clients[server] = await client.__aenter__()  # without waiting for anything
            yield self._clients[server]
        finally:
            self._under_way[server] -= 1
            if not self._under_way[server]:
                del self._under_way[server]
                await self._clients.pop(server).__aexit__()


def whole(so_far: Generated, sampling: Sampling) -> Generated | None:
    """`so_far` as a whole answer, if it is one: it was cut off after its last token."""
    if so_far.finish_reason != "partial":
        return so_far
    if len(so_far.token_ids) and int(so_far.token_ids[-1]) in sampling.stop_token_ids:
        return replace(so_far, finish_reason="stop")
    if len(so_far.token_ids) >= sampling.max_tokens:
        return replace(so_far, finish_reason="length")
    return None
