"""The controller's HTTP interface, and the batches and evaluations behind it.

    GET  /status?wait=SECONDS        `Status`, at once when starting has ended
    POST /batches/STEP               start sampling; the body names the weight version
    GET  /batches/STEP?wait=SECONDS  200: the header; 202: progress; 409: the run shall stop
    POST /batches/STEP/tokens        int32 response indices -> a token block
    POST /evaluations/NAME           start an evaluation
    GET  /evaluations/NAME?wait=S    200: its result; 202: progress

Every request needs the bearer token. A failure is a 500 with `error`, and `user`: whether the user can correct it.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from aiohttp import web

from dapo_megatron.errors import UserError
from dapo_megatron.rollout.blocks import BatchTokens, encode_block, encode_header, select
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.types import BatchHeader

logger = logging.getLogger(__name__)

KEPT_BATCHES = 2
LONGEST_WAIT = 60.0
UNBEGUN_WAIT = 0.2
"""Seconds after which to ask again for what another rank has not begun yet."""

T = TypeVar("T")


class BudgetExhaustedError(Exception):
    """The prompt budget is used up and the run is configured to end then; the text says so."""


class Work(Protocol):
    """What the controller does once its servers are healthy."""

    async def sample(self, step: int, version: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        """The batch of a step. Raises BudgetExhaustedError."""
        ...

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        """The result of an evaluation, JSON-able."""
        ...


@dataclass
class Job(Generic[T]):
    """Something under way, its progress, and what it was asked for with."""

    task: "asyncio.Task[T]"
    progress: Progress
    version: int = 0


@dataclass
class Status:
    """`state` is starting, ready or failed; `user`: the user can correct the error.

    `healthy` of `total` servers have started; `message` is a log line of one that has not. `servers` are pairs of URL
    and token, once all are there.
    """

    state: str = "starting"
    error: str = ""
    user: bool = False
    healthy: int = 0
    total: int = 0
    message: str = ""
    servers: list[tuple[str, str]] = field(default_factory=list)


class Service:
    """Routes, and the jobs behind them. Clients must send `token`."""

    def __init__(self, token: str):
        self.status = Status()
        self._token = token
        self._work: Work | None = None
        self._started = asyncio.Event()  # ready or failed
        self._failed = asyncio.Event()
        self._batches: dict[int, Job[tuple[BatchHeader, BatchTokens]]] = {}
        self._evaluations: dict[str, Job[dict[str, Any]]] = {}

    def ready(self, work: Work, servers: list[tuple[str, str]]) -> None:
        """Accept batches and evaluations from now on."""
        self._work = work
        self.status.servers = servers
        self.status.state = "ready"
        self._started.set()

    def fail(self, error: BaseException) -> None:
        """Answer everything with this error from now on, those that wait included. The first error counts."""
        if self.status.state == "failed":
            return
        logger.error("the controller failed", exc_info=error)
        text = str(error) if isinstance(error, UserError | RuntimeError) else repr(error)
        self.status = Status("failed", text, isinstance(error, UserError))
        self._started.set()
        self._failed.set()

    async def close(self) -> None:
        """Cancel all that is under way."""
        tasks: list[asyncio.Task[Any]] = [job.task for job in self._batches.values()]
        tasks += [job.task for job in self._evaluations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/status", self._get_status),
                web.post(r"/batches/{step:\d+}", self._begin_batch),
                web.get(r"/batches/{step:\d+}", self._get_batch),
                web.post(r"/batches/{step:\d+}/tokens", self._get_tokens),
                web.post("/evaluations/{name}", self._begin_evaluation),
                web.get("/evaluations/{name}", self._get_evaluation),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return web.json_response({"error": "wrong or missing token"}, status=401)
        if self._failed.is_set() and request.path != "/status":
            return self._failure()
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except BudgetExhaustedError as stop:
            return web.json_response({"stop": str(stop)}, status=409)
        except Exception as error:
            # A batch that failed once would fail again, or hide that something is wrong: the run ends here.
            self.fail(error)
            return self._failure()

    def _failure(self) -> web.Response:
        return web.json_response({"error": self.status.error, "user": self.status.user}, status=500)

    async def _get_status(self, request: web.Request) -> web.Response:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._started.wait(), _wait(request))
        return web.json_response(asdict(self.status))

    async def _begin_batch(self, request: web.Request) -> web.Response:
        step, version = int(request.match_info["step"]), int((await request.json())["version"])
        running = self._batches.get(step)
        if running is not None:
            if running.version != version:
                return _refused(f"the batch of step {step} was begun with version {running.version}, not {version}")
            return web.json_response({})
        if any(not job.task.done() for job in self._batches.values()):
            return _refused(f"the batch of step {step} cannot begin before the one under way is complete")
        progress = Progress()
        task = asyncio.create_task(self._ready_work().sample(step, version, progress))
        self._batches[step] = Job(task, progress, version)
        for old in sorted(self._batches)[:-KEPT_BATCHES]:
            del self._batches[old]
        return web.json_response({})

    async def _get_batch(self, request: web.Request) -> web.Response:
        job = await self._finished(self._batches, int(request.match_info["step"]), _wait(request))
        if job is None or not job.task.done():
            return _progress(job)
        header, _ = job.task.result()
        return web.Response(body=await asyncio.to_thread(encode_header, header))

    async def _get_tokens(self, request: web.Request) -> web.Response:
        job = self._batches.get(int(request.match_info["step"]))
        if job is None or not job.task.done():
            return _refused(f"there is no complete batch of step {request.match_info['step']}")
        header, tokens = job.task.result()
        responses = np.frombuffer(await request.read(), dtype=np.int32)
        try:
            block = select(header, tokens, responses)
        except IndexError as error:
            return _refused(str(error))
        return web.Response(body=await asyncio.to_thread(encode_block, block))

    async def _begin_evaluation(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._evaluations:
            progress = Progress()
            self._evaluations[name] = Job(asyncio.create_task(self._ready_work().evaluate(progress)), progress)
        return web.json_response({})

    async def _get_evaluation(self, request: web.Request) -> web.Response:
        job = await self._finished(self._evaluations, request.match_info["name"], _wait(request))
        if job is None or not job.task.done():
            return _progress(job)
        return web.json_response(job.task.result())

    async def _finished(self, jobs: dict[Any, Job[T]], key: object, wait: float) -> Job[T] | None:
        """The job, after it has finished or `wait` seconds; None if nobody has begun it yet.

        Raises:
            RuntimeError: when the controller fails meanwhile.
        """
        job = jobs.get(key)
        failure = asyncio.ensure_future(self._failed.wait())
        awaited = [failure, job.task] if job else [failure]
        timeout = wait if job else min(wait, UNBEGUN_WAIT)
        try:
            await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure.cancel()
        if self._failed.is_set():
            raise RuntimeError(self.status.error)
        return job

    def _ready_work(self) -> Work:
        if self._work is None:
            raise RuntimeError("the controller was asked for work before its servers were healthy")
        return self._work


def _wait(request: web.Request) -> float:
    return min(float(request.query.get("wait", 0)), LONGEST_WAIT)


def _progress(job: Job[Any] | None) -> web.Response:
    return web.json_response(asdict(job.progress if job else Progress()), status=202)


def _refused(reason: str) -> web.Response:
    return web.json_response({"error": reason, "user": False}, status=400)
