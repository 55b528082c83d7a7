"""Many servers as one: where an answer is generated, and how it goes on when its server fails or gets weights."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.client import ABORT_GRACE, ServerClient
from dapo_megatron.rollout.members import Attempt, Member, Place, VersionError
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.requests import NOTHING, AnswerTask, Engine, Generated, RequestError, Sampling, Server
from dapo_megatron.types import Int32, Prompt, Sample

SUSPECT_AFTER = 3
"""Failures in a row after which a server is reported, and rests until its health was looked at."""

MOST_DOUBLINGS = 6  # of the pause between two attempts at an answer
CONTROL_TIMEOUT = 60.0  # seconds for a server to pause or to go on
LENGTHS = 256  # answers over which the mean length runs

logger = logging.getLogger(__name__)

HoldMode = Literal["wait", "keep", "abort"]


class Control(Protocol):
    """What the fleet itself asks of a server; `ServerClient` is the real one."""

    async def pause(self) -> None:
        """Raises RequestError."""
        ...

    async def resume(self) -> None:
        """Raises RequestError."""
        ...


@asynccontextmanager
async def _connected(server: Server) -> AsyncIterator[Control]:
    async with ServerClient(server.url, server.token, CONTROL_TIMEOUT) as client:
        yield client


@dataclass(eq=False)
class AnswerGroup:
    """The answers to one prompt. They belong on one server, where they share the prompt's keys and values."""

    draw: int  # -1: of an evaluation, which leaves no records
    prompt: Prompt
    size: int
    sampling: Sampling
    by_rule: bool = False
    home: str | None = None  # server where the last of them began


@dataclass(eq=False)
class Answer:
    """One answer on its way. `name` is unlike that of any other; `so_far` is what there is between two attempts."""

    group: AnswerGroup
    index: int
    name: str
    so_far: Generated = NOTHING
    attempt: Attempt | None = None
    server: str | None = None  # where it is, or was last
    attempts: int = 0
    stopped: bool = False

    @property
    def tokens(self) -> int:
        """Tokens there are, those included that have arrived in this attempt."""
        return len(self.so_far.token_ids) + (self.attempt.received if self.attempt else 0)


class Fleet:
    """Runs answers on whichever servers there are; see `dapo_megatron.rollout.supervisor` for who says which.

    An answer that fails goes on from what has arrived, on another server where there is one, up to
    `config.request_retries` times, after a pause (seconds) that doubles each time up to a bound. `on_suspect` is called
    with the id of a server that keeps failing or is silent, and the reason. To be used within one event loop.
    """

    def __init__(
        self,
        engine: Engine,
        config: FleetConfig,
        records: Records,
        connect: Callable[[Server], AbstractAsyncContextManager[Control]] = _connected,
        pause: float = 0.5,
    ) -> None:
        self.on_suspect: Callable[[str, str], None] = lambda id, reason: None
        self._engine = engine
        self._config = config
        self._records = records
        self._connect = connect
        self._pause = pause
        self._places: dict[str, Place] = {}
        self._paused: set[str] = set()  # URLs of servers that must be told to go on
        self._held = False
        self._waiting = 0  # answers without a server
        self._open = asyncio.Event()  # an answer may begin
        self._idle = asyncio.Event()  # no answer is under way
        self._lengths = 0
        self._mean_length = 0.0
        self._watching = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._update()

    def add(self, server: Server, version: int | None) -> None:
        """A healthy server joins, or one that is joining has the weights `version` now. None: it has none yet."""
        place = self._places.get(server.id)
        if place is None or place.server != server:
            if place is not None:
                self.remove(server.id, "it was started again")
            place = self._places[server.id] = Place(server, None)
        if version is not None:
            self._ready(place, version)
        self._update()

    def remove(self, id: str, reason: str) -> None:
        """A server is gone, or is no good. Its answers go on elsewhere, from the tokens that have arrived."""
        place = self._places.pop(id, None)
        if place is not None:
            logger.warning(
                "server %s leaves the fleet: %s; %d answers go on elsewhere", id, reason, len(place.attempts)
            )
            self._spawn(self._end([place], "removed"))
            self._update()

    def members(self) -> list[Member]:
        """All servers, in the order in which they joined."""
        now = _now()
        return [place.member(now) for place in self._places.values()]

    @property
    def waits(self) -> bool:
        """Whether an answer waits for a server: it will not be there before one is ready."""
        return self._waiting > 0

    async def hold(self, mode: HoldMode) -> None:
        """Let no answer begin until `release`, and wait until none samples a token.

        Those under way are finished (wait), paused on their servers (keep), or ended, to be continued (abort).
        """
        self._held = True
        self._update()
        if mode == "keep":
            await asyncio.gather(*map(self._pause_server, list(self._places.values())))
            return
        if mode == "abort":
            await self._end(self._places.values(), "aborted")
        await self._idle.wait()

    def release(self, version: int, ids: Collection[str]) -> None:
        """The servers `ids` have the weights `version` now, all others have none to sample with. Answers go on."""
        for place in self._places.values():
            if place.server.id in ids:
                self._ready(place, version)
            else:
                place.version = None
                self._spawn(self._end([place], "aborted"))
        self._held = False
        self._update()

    async def answer(self, answer: Answer) -> Sample:
        """A whole answer, graded.

        Raises:
            RequestError: the last one, when its retries are used up, no server can answer it, or it was stopped.
            VersionError: when a server says that it sampled with weights that it cannot have.
        """
        failures = 0
        avoid = None
        while not answer.stopped:
            place = await self._place(answer, avoid)
            attempt = self._begin(place, answer)
            try:
                return await self._attempt(place, attempt, answer)
            except RequestError as error:
                if attempt.ended is not None:
                    continue
                failures += 1
                logger.warning("answer %s, failure %d: %s", answer.name, failures, error)
                self._failed(place, error)
                if error.kind == "refused" or failures > self._config.request_retries:
                    raise
                avoid = place.server.id
            await asyncio.sleep(self._pause * 2 ** min(failures - 1, MOST_DOUBLINGS))
        raise RequestError(f"answer {answer.name} was stopped", answer.so_far, "aborted")

    async def stop(self, answers: Iterable[Answer]) -> None:
        """End answers that are under way: their `answer` raises RequestError of the kind `aborted`."""
        requests = defaultdict(list)
        for answer in answers:
            answer.stopped = True
            if answer.attempt is not None and answer.server is not None:
                answer.attempt.ended = answer.attempt.ended or "aborted"
                requests[answer.server].append(answer.attempt.request_id)
        running = [(self._places[id].server, ids) for id, ids in requests.items() if id in self._places]
        await asyncio.gather(*(self._engine.abort(server, ids) for server, ids in running))

    async def close(self) -> None:
        """End what runs beside the answers, and leave no server paused that has whole weights.

        One that is held, or has missed a push, may have a part of new ones: who asked it would get anything.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        whole = [] if self._held else [place.server for place in self._places.values() if place.ready]
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_GRACE):
                waiting = [self._resume(server) for server in whole if server.url in self._paused]
                await asyncio.gather(*waiting, return_exceptions=True)
        if self._paused and self._config.mode == "external":
            logger.warning(
                "servers %s stay paused: the run ended before a push did, and parts of their weights may be missing; "
                "the first push of another run lets them go on",
                ", ".join(sorted(self._paused)),
            )

    async def _place(self, answer: Answer, avoid: str | None) -> Place:
        """The server for the next attempt; waits until there is one."""
        self._waiting += 1
        try:
            while (place := self._choose(answer, avoid)) is None:
                await self._open.wait()
        finally:
            self._waiting -= 1
        return place

    def _choose(self, answer: Answer, avoid: str | None) -> Place | None:
        """The server with the fewest tokens to come; its group's own, unless that has a group's worth more of them."""
        usable = [] if self._held else [place for place in self._places.values() if self._usable(place)]
        usable = [place for place in usable if place.server.id != avoid] or usable
        if not usable:
            return None
        least = min(usable, key=lambda place: place.load)
        home = next((place for place in usable if place.server.id == answer.group.home), least)
        group_load = answer.group.size * self._expected(answer.group.sampling) + len(answer.group.prompt.token_ids)
        return home if home.load_without(answer.group) <= least.load + group_load else least

    def _usable(self, place: Place) -> bool:
        return place.ready and not place.rests

    def _expected(self, sampling: Sampling) -> int:
        """Tokens that an answer will probably have."""
        return max(1, int(self._mean_length) if self._lengths else sampling.max_tokens // 2)

    def _begin(self, place: Place, answer: Answer) -> Attempt:
        assert place.version is not None, "answers begin on ready servers only"
        group = answer.group
        answer.attempts += 1
        answer.server = group.home = place.server.id
        answer.attempt = Attempt(
            request_id=f"{answer.name}-{answer.attempts}",
            group=group,
            prompt_length=len(group.prompt.token_ids),
            began=_now(),
            versions=[place.version],
            expected=max(1, self._expected(group.sampling) - len(answer.so_far.token_ids)),
        )
        place.begin(answer.attempt)
        self._update()
        self._watch()
        return answer.attempt

    async def _attempt(self, place: Place, attempt: Attempt, answer: Answer) -> Sample:
        """One request. Raises RequestError after keeping what had arrived in `answer.so_far`."""
        group, before = answer.group, len(answer.so_far.token_ids)
        ended, reason, tokens = "aborted", "cancelled", before
        try:
            task = AnswerTask(
                attempt.request_id, group.prompt, group.sampling, answer.so_far, group.by_rule, attempt.versions[0]
            )
            sample = await self._engine.answer(place.server, task, lambda count: place.arrived(attempt, count, _now()))
            if not self._credible(place, attempt, sample.versions[before:]):
                raise RequestError(f"server {place.server.id} left the fleet with other weights", answer.so_far)
            ended, reason, tokens = "finished", sample.finish_reason, len(sample.token_ids)
            place.failures = 0
            self._measure(tokens)
            return sample
        except VersionError as error:
            ended, reason = "failed", str(error)
            raise
        except RequestError as error:
            ended, reason, part = attempt.ended or "failed", str(error), error.partial
            if len(part.token_ids) >= before and self._credible(place, attempt, part.versions[before:]):
                answer.so_far, tokens = part, len(part.token_ids)
            raise
        finally:
            answer.attempt = None
            place.end(attempt)
            self._update()
            if group.draw >= 0:
                self._records.add(
                    "attempt",
                    draw=group.draw,
                    index=answer.index,
                    server=place.server.id,
                    request=attempt.request_id,
                    tokens_before=before,
                    tokens_after=tokens,
                    ended=ended,
                    reason=reason,
                )

    def _credible(self, place: Place, attempt: Attempt, versions: Int32) -> bool:
        """Whether an attempt's tokens can be of these versions. Raises VersionError if the server is still a member."""
        try:
            attempt.check(place.server, versions)
        except VersionError:
            if attempt.ended != "removed":
                raise
            return False  # which weights a server had last that has left the fleet is nobody's concern
        return True

    def _measure(self, length: int) -> None:
        self._lengths = min(self._lengths + 1, LENGTHS)
        self._mean_length += (length - self._mean_length) / self._lengths

    def _failed(self, place: Place, error: RequestError) -> None:
        if error.kind != "server":
            return
        place.failures += 1
        if place.failures % SUSPECT_AFTER == 0:
            self._suspect(place, f"{place.failures} failures in a row, the last: {error}")

    def _suspect(self, place: Place, reason: str) -> None:
        """Report a server, and let nothing begin on it until its health was looked at."""
        if self._places.get(place.server.id) is not place:
            return
        logger.warning("server %s is suspected: %s", place.server.id, reason)
        place.rests = True
        asyncio.get_running_loop().call_later(self._config.health_every, self._rested, place)
        self._update()
        self._records.add("server", id=place.server.id, state="suspect", reason=reason, version=place.version)
        self.on_suspect(place.server.id, reason)

    def _rested(self, place: Place) -> None:
        place.rests = False
        self._update()

    def _watch(self) -> None:
        """Look for servers that are silent, as long as answers are under way."""
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(self._config.stall_timeout / 4, self._look)

    def _look(self) -> None:
        self._watching = False
        now = _now()
        for place in list(self._places.values()):
            quiet = now - place.moved
            waits = self._held and place.server.url in self._paused
            if place.attempts and not waits and quiet > self._config.stall_timeout:
                place.moved = now  # or it would be reported again at once
                self._suspect(place, f"no token of its {len(place.attempts)} answers for {quiet:.0f} s")
        if any(place.attempts for place in self._places.values()):
            self._watch()

    async def _end(self, places: Iterable[Place], why: Literal["aborted", "removed"]) -> None:
        """End all requests of servers; they keep what has arrived."""
        running = [(place, list(place.attempts)) for place in places if place.attempts]
        for place, _ in running:
            for attempt in place.attempts.values():
                attempt.ended = why
        await asyncio.gather(*(self._engine.abort(place.server, ids) for place, ids in running))

    async def _pause_server(self, place: Place) -> None:
        if not place.attempts:
            return
        self._paused.add(place.server.url)
        try:
            async with self._connect(place.server) as control:
                await control.pause()
        except RequestError as error:
            self._suspect(place, f"it could not be paused: {error}")
            await self._end([place], "aborted")

    def _ready(self, place: Place, version: int) -> None:
        # One that comes without weights may have been paused long before, and such a push leaves it as it was.
        newcomer = not place.ready and self._config.on_push == "keep"
        place.received(version, _now())
        if newcomer or place.server.url in self._paused:
            self._spawn(self._resume_server(place))

    async def _resume_server(self, place: Place) -> None:
        try:
            await self._resume(place.server)
        except RequestError as error:
            self._suspect(place, f"it could not go on after a push: {error}")

    async def _resume(self, server: Server) -> None:
        async with self._connect(server) as control:
            await control.resume()
        self._paused.discard(server.url)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _update(self) -> None:
        """Wake those who wait for a server or for the end of all answers."""
        _set(self._open, not self._held and any(map(self._usable, self._places.values())))
        _set(self._idle, not any(place.attempts for place in self._places.values()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _set(event: asyncio.Event, value: bool) -> None:
    event.set() if value else event.clear()
