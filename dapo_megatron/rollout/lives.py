"""The life of one server: it starts or is found, serves, is lost, and comes back if it can."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol

import aiohttp

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.checks import UnreachableError
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.server import Server as Process
from dapo_megatron.rollout.server import kill_server, log_tail, stop_server, wait_until_healthy
from dapo_megatron.rollout.vllm_api import HEALTH

WATCH_SECONDS = 1.0
PAUSE_SECONDS = 1.0
"""Pause before a server is started again or taken back for the first time; it doubles each time."""

LONGEST_PAUSE = 600.0
MOST_DOUBLINGS = 20
LOG_LINES = 15
LIVES = itertools.count()
"""Numbers each time that a server comes: one that leaves `fleet.urls_file` and is added again is another one, too."""

logger = logging.getLogger(__name__)

State = Literal["starting", "serving", "away", "ended"]


class GoneError(Exception):
    """A server is not there; the text says how that was noticed."""


class Host(Protocol):
    """Who looks after all lives (`dapo_megatron.rollout.supervisor.Supervisor`)."""

    async def join(self, life: "Life", server: Server) -> None:
        """Check a healthy server and give it to the fleet.

        Raises:
            UserError: if this run cannot use it.
            UnreachableError: if it does not answer.
        """
        ...

    def leave(self, life: "Life", reason: str) -> None:
        """Take a server from the fleet."""
        ...

    async def room(self, life: "ManagedLife") -> None:
        """Wait until a server may be started again: others may have the memory that it needs."""
        ...

    def note(self, life: "Life", state: str, reason: str) -> None:
        """Record what happened."""
        ...

    def show(self, line: str) -> None:
        """Show a line of the log of a server that starts."""
        ...

    @property
    def session(self) -> aiohttp.ClientSession:
        """For health checks."""
        ...


class Life(ABC):
    """One server under the name `id`. A server that is `away` may come back, one that has `ended` does not.

    `reason` says why it does not serve. `server` is there while it serves.
    """

    def __init__(self, id: str, fleet: FleetConfig, host: Host) -> None:
        self.id = id
        self.state: State = "starting"
        self.reason = ""
        self.server: Server | None = None
        self.joined = asyncio.Event()  # at least once
        self._fleet, self._host = fleet, host
        self._losses: asyncio.Queue[str] = asyncio.Queue()
        self._lost = 0
        self._silent = False  # whether it was lost by not answering

    @abstractmethod
    async def run(self) -> None:
        """Live to the end. Raises UserError if the server has never served and cannot."""

    @property
    def serves(self) -> bool:
        """Whether the fleet has it."""
        return self.server is not None

    def lose(self, reason: str) -> None:
        """The server fails others: it is taken out at once."""
        if self.serves:
            self._host.leave(self, reason)
            self.server = None
            self._losses.put_nowait(reason)

    async def serve(self, server: Server) -> str:
        """Have a healthy server in the fleet until it is lost; the reason.

        Raises:
            UserError, UnreachableError: if it cannot join.
        """
        await self._host.join(self, server)
        self.server, self.state, self.reason = server, "serving", ""
        self.joined.set()
        self._silent = False
        waits = [self._losses.get(), self._silence(server.url), self._exit()]
        tasks = [asyncio.create_task(wait) for wait in waits]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
        self.lose(reason)
        self._losses = asyncio.Queue()
        self._lost += 1
        return reason

    async def _silence(self, url: str) -> str:
        """Wait until the server is gone, or has not answered for too long; what happened."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(self._fleet.health_every)
            try:
                if await self._answers(url):
                    heard = time.monotonic()
            except GoneError as error:
                return str(error)
            if time.monotonic() - heard > self._fleet.stall_timeout:
                self._silent = True
                return f"it has not answered for {self._fleet.stall_timeout:g} s (fleet.stall_timeout)"

    async def _answers(self, url: str) -> bool:
        """Whether the server is healthy; False: it is silent.

        Raises:
            GoneError: if nothing listens there, or it says that it is not healthy.
        """
        timeout = aiohttp.ClientTimeout(total=self._fleet.health_every)
        try:
            async with self._host.session.get(url + HEALTH, timeout=timeout) as reply:
                status = reply.status
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise GoneError("nothing listens at its address any more") from None
            return False
        except (aiohttp.ClientError, TimeoutError):
            return False
        if status != 200:
            raise GoneError(f"it answers GET {HEALTH} with {status}")
        return True

    async def _lives(self, url: str) -> bool:
        """Whether the server is healthy."""
        try:
            return await self._answers(url)
        except GoneError:
            return False

    async def _until_it_answers(self, url: str) -> None:
        while not await self._lives(url):
            await asyncio.sleep(self._fleet.health_every)

    async def _exit(self) -> str:
        """Wait until the server's process has ended; never, where it is not ours."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def _to(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason

    def _pause(self) -> float:
        return min(PAUSE_SECONDS * 2.0 ** min(max(self._lost - 1, 0), MOST_DOUBLINGS), LONGEST_PAUSE)


class ExternalLife(Life):
    """A server that others start. One that was lost is taken back as soon as it answers again.

    One that comes `late`, during a run, is not needed: it is away until it joins, and may be unfit.
    """

    def __init__(self, url: str, token: str, fleet: FleetConfig, host: Host, *, late: bool) -> None:
        super().__init__(url.partition("://")[2], fleet, host)
        self._url, self._token, self._late = url, token, late
        if late:
            self._to("away", "it has not answered yet")

    async def run(self) -> None:
        """See `Life.run`, for one that is not late; it has no end but being cancelled."""
        while True:
            await self._until_it_answers(self._url)
            try:
                reason = await self.serve(Server(self.id, self._url, self._token, next(LIVES)))
            except (UserError, UnreachableError) as error:
                if isinstance(error, UserError) and not self._late and not self.joined.is_set():
                    raise
                self._lost += 1
                reason = str(error)
                logger.warning("server %s cannot join: %s", self.id, reason)
            self._to("away", reason)
            await asyncio.sleep(self._pause())


class ManagedLife(Life):
    """A server of this run. One that was lost is killed and started again, `fleet.max_restarts` times.

    Args:
        start: starts it; gets how often it was started before.
        token: opens it.
        fleet: times and limits.
        index: its number.
        host: who looks after it.
    """

    def __init__(self, index: int, start: Callable[[int], Process], token: str, fleet: FleetConfig, host: Host) -> None:
        super().__init__(f"server_{index}", fleet, host)
        self._start, self._token = start, token
        self._restarts = 0
        self._process: Process | None = None

    def begin(self) -> None:
        """Start the process. Raises UserError."""
        self._process = self._start(self._restarts)
        self._host.note(self, "restarted" if self._restarts else "started", self.reason)

    @property
    def runs(self) -> bool:
        """Whether there is a process, in whatever state."""
        return self._process is not None and _exit_code(self._process) is None

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process is not None and self.runs:
            self._process.process.terminate()

    def stop(self) -> None:
        """End the process and what it started; blocks. Safe to call twice."""
        if self._process is not None:
            stop_server(self._process)

    async def run(self) -> None:
        """See `Life.run`."""
        while True:
            try:
                reason = await self._live()
            except (UserError, UnreachableError) as error:
                if not self.joined.is_set():
                    raise
                self._lost += 1
                reason = str(error)
            if self._process is not None:
                await asyncio.to_thread(kill_server, self._process)
            if self._restarts == self._fleet.max_restarts:
                self._to("ended", reason)
                return
            self._restarts += 1
            self._to("starting", reason)
            await asyncio.sleep(self._pause())
            await self._host.room(self)
            try:
                self.begin()
            except UserError as error:  # its port may be taken for a while
                logger.warning("server %s cannot be started again: %s", self.id, error)

    async def _live(self) -> str:
        """Have the started process serve until it is lost; the reason. One that hangs for good is given time."""
        process = self._process
        assert process is not None
        loop = asyncio.get_running_loop()

        def show(seconds: float, line: str) -> None:
            loop.call_soon_threadsafe(self._host.show, line)

        await asyncio.to_thread(wait_until_healthy, process, self._fleet.start_timeout, show)
        while True:
            reason = await self.serve(Server(self.id, process.url, self._token, next(LIVES)))
            if not await self._recovers(process, reason):
                return self._told(process, reason)

    async def _recovers(self, process: Process, reason: str) -> bool:
        """Whether a lost server may be taken back as it is: it was silent, and answers again.

        One that can be started again has `fleet.stall_timeout` seconds for that, one that cannot has all the time.
        """
        last_chance = self._restarts == self._fleet.max_restarts
        if not last_chance and not self._silent and (await self._lives(process.url) or _exit_code(process) is not None):
            return False  # it is there and fails all the same, or has ended
        self._to("away" if last_chance else "starting", self._told(process, reason))
        await asyncio.sleep(self._pause())
        waits = [self._exit(), self._until_it_answers(process.url)]
        tasks = [asyncio.create_task(wait) for wait in waits]
        try:
            timeout = None if last_chance else self._fleet.stall_timeout
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return tasks[1].done() and _exit_code(process) is None
        finally:
            for task in tasks:
                task.cancel()

    async def _exit(self) -> str:
        assert self._process is not None
        while (code := _exit_code(self._process)) is None:
            await asyncio.sleep(WATCH_SECONDS)
        return f"it ended with code {code}"

    def _told(self, process: Process, reason: str) -> str:
        """The reason, with the end of the log where the process has ended by itself."""
        if (code := _exit_code(process)) is None:
            return reason
        tail = "\n".join(f"    {line}" for line in log_tail(process.log_path, LOG_LINES))
        return f"it ended with code {code}; the end of {process.log_path}:\n{tail}"


def _exit_code(process: Process) -> int | None:
    return process.process.poll()
