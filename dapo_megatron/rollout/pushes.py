"""Weight pushes as the controller sees them: the fleet is held, the trainer sends, the fleet goes on.

A push is tried until it has reached every server that is left. The ranks ask for the servers of each attempt, and all
get the same ones.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dapo_megatron.rollout.requests import Server

HoldMode = Literal["wait", "keep", "abort"]
POLL_SECONDS = 0.2
KEPT_PUSHES = 2  # a rank may ask for the last one when another has begun the next


class Servers(Protocol):
    """The servers of a run (`dapo_megatron.rollout.supervisor.Supervisor`)."""

    def healthy(self) -> list[Server]:
        """Those that answer, with usable weights or without."""
        ...

    def joining(self) -> list[Server]:
        """Those that answer, but have no usable weights."""
        ...

    def any_ready(self) -> bool:
        """Whether one answers that has usable weights."""
        ...

    async def hold(self, mode: HoldMode) -> None:
        """Let no answer begin; those under way are finished (wait), paused (keep) or ended for now (abort)."""
        ...

    def release(self, version: int, servers: Collection[Server]) -> None:
        """These servers have the weights `version`, the others none that are usable; answers go on."""
        ...

    def admitted(self, server: Server, version: int) -> None:
        """This server has the weights `version`."""
        ...

    def failed(self, id: str, reason: str) -> None:
        """A server could not be brought to the weights: it is taken out."""
        ...


@dataclass
class Push:
    """One push: its servers by attempt, and whether it is over."""

    version: int
    attempts: list[tuple[Server, ...]] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # set with every attempt
    done: bool = False


class Pushes:
    """All pushes of a run, by number from 0.

    Args:
        servers: the fleet.
        mode: what becomes of answers under way.
        before: awaited before the fleet is held.
        on_failure: gets what goes wrong in the background.
    """

    def __init__(
        self,
        servers: Servers,
        mode: HoldMode,
        before: Callable[[], Awaitable[None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._servers, self._mode, self._before, self._on_failure = servers, mode, before, on_failure
        self._pushes: dict[int, Push] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, number: int, version: int) -> None:
        """Hold the fleet for a push of the weights `version`, then open its first attempt. Twice does no harm."""
        if number not in self._pushes:
            self._pushes[number] = Push(version)
            self._pushes.pop(number - KEPT_PUSHES, None)
            task = asyncio.create_task(self._open(self._pushes[number]))
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    async def servers(self, number: int, attempt: int, wait: float) -> tuple[Server, ...] | None:
        """The servers of an attempt; None if it has not been opened within `wait` seconds."""
        if (push := self._pushes.get(number)) is None:
            await asyncio.sleep(min(wait, POLL_SECONDS))
        elif len(push.attempts) <= attempt:
            await asyncio.wait([opened := asyncio.ensure_future(push.opened.wait())], timeout=wait)
            opened.cancel()
        push = self._pushes.get(number)
        return push.attempts[attempt] if push is not None and len(push.attempts) > attempt else None

    def failed(self, number: int, attempt: int, id: str, reason: str) -> None:
        """A server failed in an attempt: it is taken out, and the next attempt has the rest."""
        push = self._pushes[number]
        if attempt == len(push.attempts) - 1:
            self._servers.failed(id, reason)
            self._next(push)

    def done(self, number: int, attempt: int) -> tuple[int, tuple[Server, ...]]:
        """The servers of an attempt have the weights: the fleet goes on. Returns the version and the servers."""
        push = self._pushes[number]
        servers = push.attempts[attempt]
        if not push.done:
            push.done = True
            self._servers.release(push.version, servers)
        return push.version, servers

    async def _open(self, push: Push) -> None:
        await self._before()
        await self._hold()
        self._next(push)

    def _next(self, push: Push) -> None:
        push.attempts.append(tuple(self._servers.healthy()))
        push.opened.set()
        push.opened = asyncio.Event()

    async def _hold(self) -> None:
        """Answers that wait for a server would never finish: the servers that could take them wait for this push."""
        holding = asyncio.ensure_future(self._servers.hold(self._mode))
        while not (await asyncio.wait([holding], timeout=POLL_SECONDS))[0]:
            if self._mode == "wait" and not self._servers.any_ready():
                holding.cancel()
                await asyncio.wait([holding])
                await self._servers.hold("abort")
                return
        holding.result()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
