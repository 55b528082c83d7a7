"""Servers that follow a script, without HTTP: what they say depends on the answer alone, so that nothing can be lost,
doubled or mixed up without being seen."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from dapo_megatron.rollout.requests import AnswerTask, Generated, RequestError, Server
from dapo_megatron.types import Sample

STOP = 0  # ends an answer


def length_of(first: int) -> int:
    """Tokens of the answer whose first token is `first`."""
    return 1 + first * 7919 % 23


def script(prompt: int, first: int) -> list[int]:
    """All tokens of the answer to prompt number `prompt` that begins with `first`."""
    middle = [first] + [1 + (prompt * 31 + first * 17 + place * 7) % 1000 for place in range(1, length_of(first))]
    return [*middle[:-1], STOP] if len(middle) > 1 else middle


@dataclass
class ScriptedServer:
    """A server in a state that the test sets. `version` is that of its weights."""

    server: Server
    version: int | None = None
    alive: bool = True
    frozen: bool = False
    running: dict[str, asyncio.Event] = field(default_factory=dict)  # set: it is to end
    moving: asyncio.Event = field(default_factory=asyncio.Event)  # not paused
    pauses: int = 0

    def __post_init__(self) -> None:
        self.moving.set()

    async def pause(self) -> None:
        if not self.alive or self.frozen:
            raise RequestError(f"server {self.server.id} cannot be paused")
        self.pauses += 1
        self.moving.clear()

    async def resume(self) -> None:
        if not self.alive or self.frozen:
            raise RequestError(f"server {self.server.id} cannot be resumed")
        self.moving.set()


class ScriptedEngine:
    """Runs answers on ScriptedServers; with the probability `failing` a request fails at any token.

    An answer's first token is a number that no other has; `-version` stands as the log-prob of each token.
    """

    def __init__(self, rng: random.Random, failing: float = 0.0, grace: float = 5.0) -> None:
        self.servers: dict[str, ScriptedServer] = {}  # by URL
        self.failures: Counter[str] = Counter()  # of each answer, by its name
        self.requests: list[tuple[str, AnswerTask]] = []
        self.failing = failing
        self.pace = 1.0
        self._rng = rng
        self._grace = grace
        self._firsts = 0
        self._active: set[str] = set()

    def start(self, id: str, url: str) -> ScriptedServer:
        self.servers[url] = ScriptedServer(Server(id, url, "token"))
        return self.servers[url]

    @asynccontextmanager
    async def connect(self, server: Server) -> AsyncIterator[ScriptedServer]:
        await asyncio.sleep(0.01)
        yield self.servers[server.url]

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        name = task.request_id.rpartition("-")[0]
        assert name not in self._active, "two requests for one answer run at the same time"
        self._active.add(name)
        self.requests.append((server.id, task))
        place = self.servers[server.url]
        end = place.running[task.request_id] = asyncio.Event()
        try:
            return await self._answer(place, task, end, on_tokens, name)
        finally:
            del place.running[task.request_id]
            self._active.discard(name)

    async def _answer(
        self, place: ScriptedServer, task: AnswerTask, end: asyncio.Event, on_tokens: Callable[[int], None], name: str
    ) -> Sample:
        before = task.so_far
        ids, true, sent = before.token_ids.tolist(), (-before.log_probs).astype(int).tolist(), len(before.token_ids)

        def part(count: int, versions: Sequence[int]) -> Generated:
            return generated(ids[:count], true[:count], [*before.versions.tolist(), *versions])

        while not ids or len(ids) < length_of(ids[0]):
            await self._tick(place, end)
            if end.is_set():  # the server says everything that it has, and the versions
                raise RequestError("aborted", part(len(ids), true[len(before.token_ids) :]), "aborted")
            if not place.alive or self._rng.random() < self.failing:
                self.failures[name] += 1
                # What was not sent is lost, and nobody knows the versions of what was.
                raise RequestError("lost", part(sent, [task.version] * (sent - len(before.token_ids))))
            if not ids:
                self._firsts += 1
                ids.append(self._firsts)
            else:
                ids.append(script(task.prompt.id, ids[0])[len(ids)])
            true.append(place.version)
            if self._rng.random() < 0.5:
                on_tokens(len(ids) - sent)
                sent = len(ids)
        await asyncio.sleep(self._rng.random() * 0.1)  # grading
        whole = generated(ids, true, [*before.versions.tolist(), *true[len(before.token_ids) :]])
        return Sample(whole.token_ids, whole.log_probs, "stop", whole.versions, True, 1.0, 1.0)

    async def _tick(self, place: ScriptedServer, end: asyncio.Event) -> None:
        """Time passes until the next token, or until the request ends otherwise."""
        if not place.alive:
            await asyncio.sleep(0.01)  # connection refused
            return
        deadline = asyncio.get_running_loop().time() + self._rng.random() * self.pace
        while place.alive and not end.is_set():
            rest = deadline - asyncio.get_running_loop().time()
            if rest <= 0 and place.moving.is_set() and not place.frozen:
                return
            await asyncio.sleep(rest if rest > 0 else 0.5)

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None:
        place = self.servers[server.url]
        if place.frozen or not place.alive:
            await asyncio.sleep(self._grace)
        for name in request_ids:
            if name in place.running:
                place.running[name].set()
        while any(name in place.running for name in request_ids):
            await asyncio.sleep(0.2)

    def end_step(self, step: int) -> None: ...


def generated(ids: Sequence[int], true: Sequence[int], versions: Sequence[int]) -> Generated:
    return Generated(
        np.array(ids, np.int32), -np.array(true, np.float32), np.array(versions, np.int32), finish_reason="partial"
    )
