"""Answers on many servers, by worker processes: one process cannot parse and grade what hundreds of GPUs say."""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from dapo_megatron.config.fleet import server_urls
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.engine import LocalEngine
from dapo_megatron.rollout.frames import Arrays, Channel, pack_task, unpack_generated, unpack_sample
from dapo_megatron.rollout.requests import AnswerTask, RequestError, Server
from dapo_megatron.rollout.worker_process import local_engine
from dapo_megatron.types import Sample

SERVERS_PER_WORKER = 8
MAX_RESTARTS = 3  # of each worker
END_SECONDS = 5.0

logger = logging.getLogger(__name__)


def worker_count(configured: int | None, servers: int) -> int:
    """How many workers `fleet.workers` asks for with so many servers; 0: the controller does their work itself."""
    if configured is not None:
        return configured
    return math.ceil(servers / SERVERS_PER_WORKER) if servers > SERVERS_PER_WORKER else 0


@contextlib.asynccontextmanager
async def open_engine(config: Config) -> "AsyncIterator[LocalEngine | WorkerPool]":
    """The engine of a run.

    Raises:
        UserError: when the tokenizer or the reward function cannot be loaded.
    """
    servers = config.fleet.servers if config.fleet.mode == "managed" else len(server_urls(config.fleet))
    count = worker_count(config.fleet.workers, servers)
    async with WorkerPool(config, count) if count else await asyncio.to_thread(local_engine, config) as engine:
        yield engine


@dataclass(eq=False)
class _Request:
    """An answer under way. `worker`: where it runs, or None while it waits for one."""

    worker: "_Worker | None" = None
    aborted: bool = False  # while it waited


@dataclass
class _Call:
    """A request that a worker has not answered yet."""

    result: "asyncio.Future[Any]"
    task: AnswerTask | None = None
    on_tokens: Callable[[int], None] = lambda count: None


class WorkerPool:
    """`requests.Engine` in `count` processes. Use it inside `async with`.

    Servers are shared out in the order in which they are first used. A worker that dies fails its answers, with what
    they had begun with, and is started again up to MAX_RESTARTS times; others do its work meanwhile. `make_engine` is
    the function, as module:function, that makes a worker's engine of the configuration.
    """

    def __init__(
        self, config: Config, count: int, make_engine: str = f"{local_engine.__module__}:{local_engine.__name__}"
    ) -> None:
        self._changed = asyncio.Event()  # a worker runs, or is lost, or an answer that waits for one was aborted
        self._workers = [_Worker(index, config, make_engine, self._changed) for index in range(count)]
        self._places: dict[str, int] = {}  # of server ids, counted up
        self._requests: dict[str, _Request] = {}  # answers under way

    async def __aenter__(self) -> Self:
        try:
            started = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
            if (error := next((result for result in started if result is not None), None)) is not None:
                raise error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        """A whole answer, graded; see `requests.Engine`.

        Raises:
            RuntimeError: when a worker is broken, or none is left.
        """
        request = self._requests[task.request_id] = _Request()
        try:
            request.worker = await self._worker(server, request)
            if request.worker is None:
                text = f"answer {task.request_id} was ended before a worker began it"
                raise RequestError(text, task.so_far, "aborted")
            return await request.worker.answer(server, task, on_tokens)
        finally:
            del self._requests[task.request_id]

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None:
        """End requests; see `requests.Engine`."""
        by_worker: defaultdict[_Worker, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is None:
                continue
            if request.worker is None:
                request.aborted = True
                self._changed.set()
            else:
                by_worker[request.worker].append(request_id)
        await asyncio.gather(*(worker.abort(server, ids) for worker, ids in by_worker.items()))

    def end_step(self, step: int) -> None:
        """Each worker sums up its own failures in the log; see `requests.Engine`."""
        for worker in self._workers:
            worker.end_step(step)

    async def _worker(self, server: Server, request: _Request) -> "_Worker | None":
        """The server's own worker, or the next one that runs. Waits until there is one, or `request` is aborted."""
        place = self._places.setdefault(server.id, len(self._places)) % len(self._workers)
        in_turn = self._workers[place:] + self._workers[:place]
        while not request.aborted:
            if running := [worker for worker in in_turn if worker.running]:
                return running[0]
            if all(worker.lost for worker in in_turn):
                raise RuntimeError("all rollout workers ended; see the log for how")
            self._changed.clear()
            await self._changed.wait()
        return None


class _Worker:
    """One process and what it was asked for. `lost`: it will not run again; `changed` is set when it is, or runs."""

    def __init__(self, index: int, config: Config, make_engine: str, changed: asyncio.Event) -> None:
        self.lost = False
        self._changed = changed
        self._index = index
        self._config = config
        self._make_engine = make_engine
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None  # while it runs
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._channel is not None

    async def start(self) -> None:
        """Start it and wait until its engine is there. Raises UserError or RuntimeError when that fails."""
        channel = await self._connect()
        self._reading = asyncio.create_task(self._watch(channel))

    async def stop(self) -> None:
        """End it, whatever it does."""
        for task in (*self._sending, *([self._reading] if self._reading else [])):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail_calls("is stopped")
        await self._end_process()

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        """See `requests.Engine`."""
        members, arrays = pack_task(server, task)
        sample: Sample = await self._ask("answer", members, arrays, task, on_tokens)
        return sample

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None:
        """See `requests.Engine`."""
        with contextlib.suppress(RequestError):  # its answers have failed
            await self._ask("abort", {"server": asdict(server), "request_ids": list(request_ids)})

    def end_step(self, step: int) -> None:
        """See `requests.Engine`."""
        self._tell("end_step", {"step": step})

    async def _ask(
        self,
        kind: str,
        members: dict[str, Any],
        arrays: Arrays | None = None,
        task: AnswerTask | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Any:
        number = next(self._numbers)
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future(), task, on_tokens)
        try:
            if self._channel is None:
                raise ConnectionError
            await self._channel.send(kind, members | {"call": number}, arrays or ())
            return await call.result
        except ConnectionError:
            raise self._gone("is gone", task) from None
        except asyncio.CancelledError:
            self._tell("cancel", {"call": number})
            raise
        finally:
            del self._calls[number]

    def _tell(self, kind: str, members: dict[str, Any]) -> None:
        """Send what nobody waits for."""
        if self._channel is not None:
            task = asyncio.create_task(self._send_or_not(self._channel, kind, members))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_or_not(self, channel: Channel, kind: str, members: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            await channel.send(kind, members)

    async def _watch(self, channel: Channel) -> None:
        """Take what it sends, and start it again when it dies, as long as that may help."""
        try:
            await self._take_frames(channel)
        except Exception:
            logger.exception("rollout worker %d is given up", self._index)
            await self._end_process()
        finally:
            self.lost = True
            self._changed.set()
            self._fail_calls("is given up")

    async def _take_frames(self, channel: Channel) -> None:
        for restart in itertools.count():
            while (frame := await channel.receive()) is not None:
                self._take(*frame)
            await self._end_process()
            how = f"ended with code {self._process.returncode if self._process else None}"
            logger.warning("rollout worker %d %s; %d of %d restarts used", self._index, how, restart, MAX_RESTARTS)
            self._fail_calls(how)
            if restart == MAX_RESTARTS:
                return
            channel = await self._connect()

    def _take(self, header: dict[str, Any], arrays: Arrays) -> None:
        if header["kind"] == "tokens":
            for number, count in header["counts"]:
                if (call := self._calls.get(number)) is not None:
                    call.on_tokens(count)
            return
        call = self._calls.get(header["call"])
        if call is None or call.result.done():
            return  # was cancelled meanwhile
        match header["kind"]:
            case "sample":
                call.result.set_result(unpack_sample(header, arrays))
            case "request_error":
                partial = unpack_generated(header, arrays)
                call.result.set_exception(RequestError(header["text"], partial, header["error_kind"]))
            case "broken":
                error = RuntimeError(f"rollout worker {self._index} is broken, see its log: {header['text']}")
                call.result.set_exception(error)
            case "aborted":
                call.result.set_result(None)

    async def _connect(self) -> Channel:
        """Start the process. Raises UserError or RuntimeError when its engine cannot be made."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "dapo_megatron.rollout.worker_process", "--socket", str(theirs.fileno())]
        command += ["--parent", str(os.getpid()), "--index", str(self._index), "--engine", self._make_engine]
        with theirs:
            # Its own session: Ctrl-C is for the controller, which then ends it.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        channel = await Channel.open(ours)
        try:
            await self._greet(channel)
        except BaseException:
            await channel.close()
            raise
        self._channel = channel
        self._changed.set()
        return channel

    async def _greet(self, channel: Channel) -> None:
        with contextlib.suppress(ConnectionError):
            await channel.send("init", {"config": self._config.model_dump(mode="json")})
        frame = await channel.receive()
        if frame is None:
            raise RuntimeError(f"rollout worker {self._index} ended while it was started; see the log")
        header, _ = frame
        if header["kind"] == "failed":
            raise UserError(header["text"]) if header["user"] else RuntimeError(header["text"])

    async def _end_process(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    def _fail_calls(self, how: str) -> None:
        for call in self._calls.values():
            if not call.result.done():
                call.result.set_exception(self._gone(how, call.task))

    def _gone(self, how: str, task: AnswerTask | None) -> RequestError:
        text = f"rollout worker {self._index} {how}"
        return RequestError(text) if task is None else RequestError(text, task.so_far)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let a process end by itself for a moment: its socket is closed."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
