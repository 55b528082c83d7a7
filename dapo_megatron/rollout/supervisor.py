"""Where servers come from, and which of them the fleet has.

Runs in the main thread alone: the kernel ends a server when the thread that started it ends.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection
from functools import partial

import aiohttp

from dapo_megatron.config.fleet import server_urls
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.checks import UnreachableError, check_server
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.lives import ExternalLife, Life, ManagedLife
from dapo_megatron.rollout.pushes import HoldMode
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.requests import RequestError, Sampling, Server
from dapo_megatron.rollout.server import Server as Process
from dapo_megatron.serve import start

WATCH_SECONDS = 1.0
POLL_SECONDS = 0.1
LOOK_SECONDS = 30.0  # in which a suspected server must generate a token
logger = logging.getLogger(__name__)

OnStatus = Callable[[int, int, str], None]
"""Called with the number of servers that serve, that of all, and a log line of one that starts."""


class Supervisor:
    """All servers of a run, and the fleet that they make up.

    Args:
        config: the run's configuration.
        fleet: gets the servers.
        records: gets what happens to them.
        token: opens the servers; those that the run starts get it.
        on_status: see `OnStatus`.
    """

    def __init__(self, config: Config, fleet: Fleet, records: Records, token: str, on_status: OnStatus) -> None:
        self.session = aiohttp.ClientSession()
        self._config, self._fleet, self._records, self._token = config, fleet, records, token
        self._on_status = on_status
        self._line = ""
        self._warned = False
        self._misread = ""  # what is wrong with the file of servers
        self._begun = False  # all servers that there were at the start have joined
        self._lives: dict[str, Life] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._waiting: list[asyncio.Event] = []  # one of each server that waits for room, in their order
        self._coming = 0  # servers that have room, but no process yet

    def start(self) -> None:
        """Start the servers of a managed fleet, and look after those of any.

        Raises:
            UserError: if one cannot be started.
        """
        fleet = self._config.fleet
        for index in range(self._count()):
            managed = ManagedLife(index, partial(self._start, index), self._token, fleet, self)
            self._lives[managed.id] = managed
            managed.begin()
        for life in self._lives.values():
            self._tasks[life.id] = asyncio.create_task(life.run())
        self._follow(server_urls(fleet))

    @property
    def _shared(self) -> bool:
        """Whether servers and trainer take turns with the memory of the same GPUs."""
        return self._config.fleet.mode == "colocated"

    async def all_joined(self) -> None:
        """Wait until every server has joined the fleet.

        Raises:
            UserError: if one cannot, or external ones have not come within `fleet.start_timeout`.
        """
        deadline = time.monotonic() + self._config.fleet.start_timeout
        while missing := [life.id for life in self._lives.values() if not life.joined.is_set()]:
            self._raise_failures()
            if self._config.fleet.mode == "external" and time.monotonic() > deadline:
                raise UserError(f"servers {', '.join(missing)} do not answer (fleet.start_timeout)")
            await asyncio.sleep(0.1)
        self._begun = True

    async def watch(self) -> None:
        """Look after the servers for ever.

        Raises:
            RuntimeError: when none serves, and none ever will again, or one that may come back has not within
                `fleet.start_timeout`.
        """
        hopeful = time.monotonic()
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, self._config.fleet.health_every))
            self._raise_failures()
            if self._config.fleet.urls_file is not None:
                self._reread()
            states = {life.state for life in self._lives.values()}
            if states & {"starting", "serving"}:
                hopeful = time.monotonic()
            elif states == {"ended"} or time.monotonic() - hopeful > self._config.fleet.start_timeout:
                told = "\n".join(f"vLLM {life.id}: {life.reason}" for life in self._lives.values())
                raise RuntimeError(f"no vLLM server is left, and none can be started again.\n{told}")

    async def close(self) -> None:
        """End the servers of a managed fleet, and what they started. Safe to call twice."""
        tasks = [*self._tasks.values(), *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        managed = self._managed()
        for life in managed:
            life.terminate()
        for life in managed:
            await asyncio.to_thread(life.stop)
        await self.session.close()

    def suspect(self, id: str, reason: str) -> None:
        """The fleet reports a server that fails its answers, or is silent: it is taken out if it cannot generate.

        One that can has no fault: answers may only wait to be graded.
        """
        life = self._lives.get(id)
        if life is not None and life.server is not None and id not in self._looks:
            self._looks[id] = asyncio.create_task(self._look_at(life, life.server, reason))

    async def _look_at(self, life: Life, server: Server, reason: str) -> None:
        seconds = min(LOOK_SECONDS, self._config.fleet.stall_timeout)
        began = time.monotonic()
        try:
            async with ServerClient(server.url, server.token, seconds) as client:
                await client.generate([0], Sampling(max_tokens=1), f"look-{uuid.uuid4().hex}")
        except RequestError:
            if life.server is server and not self._generates(life.id, time.monotonic() - began):
                life.lose(reason)
        finally:
            del self._looks[life.id]

    def _generates(self, id: str, within: float) -> bool:
        """Whether a token of an answer came in the last `within` seconds: a full server has others wait in turn."""
        quiet = {member.id: member.quiet for member in self._fleet.members()}.get(id)
        return quiet is not None and quiet < within

    # What the service needs: `dapo_megatron.rollout.pushes.Servers`.

    def healthy(self) -> list[Server]:
        """All servers that serve."""
        return [life.server for life in self._lives.values() if life.server is not None]

    def joining(self) -> list[Server]:
        """Those that the trainer has to bring weights. It asks while it waits for answers, and uses no memory then."""
        if self._fleet.waits and not self._coming and not any(life.runs for life in self._managed()):
            self._make_room()
        joining = {member.id for member in self._fleet.members() if member.state == "joining"}
        return [server for server in self.healthy() if server.id in joining]

    def any_ready(self) -> bool:
        """Whether a server can begin an answer."""
        return any(member.state == "ready" for member in self._fleet.members())

    async def hold(self, mode: HoldMode) -> None:
        """See `Fleet.hold`. Before a push the trainer gives up memory: servers that wait for it are started here."""
        await self._fleet.hold(mode)
        while self._shared and any(life.state == "starting" for life in self._lives.values()):
            while self._waiting:
                self._make_room()
            await asyncio.sleep(POLL_SECONDS)

    def release(self, version: int, servers: Collection[Server]) -> None:
        """See `Fleet.release`. A server that was lost and came back meanwhile has not got these weights."""
        there = [server.id for server in servers if self._serves(server)]
        self._fleet.release(version, there)
        for id in there:
            self._record(id, "ready", "", version)

    def admitted(self, server: Server, version: int) -> None:
        """A server got the weights `version` while the others went on."""
        if self._serves(server):
            self._fleet.add(server, version)
            self._records.add("admitted", id=server.id, version=version)
            self._record(server.id, "ready", "", version)

    def failed(self, id: str, reason: str) -> None:
        """A server could not be brought to the weights."""
        if (life := self._lives.get(id)) is not None:
            life.lose(reason)

    # What a life needs: `dapo_megatron.rollout.lives.Host`.

    async def join(self, life: Life, server: Server) -> None:
        """See `Host.join`."""
        fleet = self._config.fleet
        longest = self._config.longest_sequence
        warning = await asyncio.to_thread(check_server, server.url, self._token, fleet, longest, fleet.source)
        if warning and not self._warned:
            self._warned = True
            logger.warning(warning)
        if self._shared:
            await self._put_to_sleep(server)
        self._fleet.add(server, None)
        self.note(life, "joining", life.reason)
        self._show_status()

    def leave(self, life: Life, reason: str) -> None:
        """See `Host.leave`."""
        logger.warning("server %s is taken out: %s", life.id, reason)
        self._fleet.remove(life.id, reason)
        self.note(life, "removed", reason)
        self._show_status()

    async def room(self, life: ManagedLife) -> None:
        """See `Host.room`.

        No server on the trainer's GPUs is started while it trains. Nor while others generate: it could be starting
        still when the answers are complete. One is when none is left, as without it they are not going to be complete.
        """
        if self._shared:
            self._waiting.append(room := asyncio.Event())
            await room.wait()
            self._coming -= 1

    def _make_room(self) -> None:
        """Let the server be started that has waited longest, if one waits."""
        if self._waiting:
            self._coming += 1
            self._waiting.pop(0).set()

    async def _put_to_sleep(self, server: Server) -> None:
        """It joins without weights, keys and values: every push wakes it.

        Raises:
            UnreachableError: if it does not do it.
        """
        try:
            async with ServerClient(server.url, server.token, self._config.fleet.push_timeout) as client:
                await client.sleep()
        except RequestError as error:
            raise UnreachableError(str(error)) from error

    def note(self, life: Life, state: str, reason: str) -> None:
        """See `Host.note`."""
        self._record(life.id, state, reason, None)

    def show(self, line: str) -> None:
        """See `Host.show`."""
        self._line = line
        self._show_status()

    def _record(self, id: str, state: str, reason: str, version: int | None) -> None:
        self._records.add("server", id=id, state=state, reason=reason, version=version, at=time.time())

    def _show_status(self) -> None:
        self._on_status(len(self._fleet.members()), len(self._lives), self._line)

    def _managed(self) -> list[ManagedLife]:
        """Those that this run starts."""
        return [life for life in self._lives.values() if isinstance(life, ManagedLife)]

    def _serves(self, server: Server) -> bool:
        """Whether it is still this one: after a restart or a return, the same id is another `Server`."""
        return any(life.server is server for life in self._lives.values())

    def _count(self) -> int:
        """Servers that this run starts."""
        fleet = self._config.fleet
        if self._shared:
            return trainer_gpus() // fleet.world_size
        return fleet.servers if fleet.mode == "managed" else 0

    def _start(self, index: int, restarts: int) -> Process:
        fleet = self._config.fleet
        first_gpu = trainer_gpus() if fleet.first_gpu is None else fleet.first_gpu
        if self._shared:
            first_gpu = 0
        return start(
            self._config, index, self._token, first_gpu=first_gpu + index * fleet.world_size, restarts=restarts
        )

    def _follow(self, urls: Collection[str]) -> None:
        """Look after external servers that are new in `urls`, and no more after those that are not there any more."""
        lives = {url: ExternalLife(url, self._token, self._config.fleet, self, late=self._begun) for url in urls}
        wanted = {life.id: life for life in lives.values()}
        for id in [id for id in self._lives if id not in wanted and isinstance(self._lives[id], ExternalLife)]:
            self._lives[id].lose("it is not in fleet.urls_file any more")
            self._tasks.pop(id).cancel()
            del self._lives[id]
        for id in [id for id in wanted if id not in self._lives]:
            self._lives[id] = wanted[id]
            self._tasks[id] = asyncio.create_task(wanted[id].run())

    def _reread(self) -> None:
        """Follow the file of servers. One that cannot be used, or is empty, is probably being written."""
        fleet, urls, wrong = self._config.fleet, [], ""
        try:
            urls = server_urls(fleet)
        except UserError as error:
            wrong = str(error)
        if not urls and not wrong:
            wrong = f"{fleet.source}: {fleet.urls_file} names no server"
        if wrong and wrong != self._misread:
            logger.warning("%s; the servers stay as they are", wrong)
        self._misread = wrong
        if not wrong:
            self._follow(urls)

    def _raise_failures(self) -> None:
        for task in self._tasks.values():
            if task.done() and (error := task.exception()) is not None:
                raise error


def trainer_gpus() -> int:
    """GPUs of the trainer's ranks on this node; each rank has one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
