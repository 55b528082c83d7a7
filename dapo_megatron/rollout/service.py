"""The controller's HTTP interface, and the batches, evaluations, pushes and admissions behind it.

    GET  /status?wait=SECONDS               `Status`, at once when starting has ended
    POST /batches/STEP                      queue the sampling; the body names the weight versions
    GET  /batches/STEP?wait=S&after=N       200: the header; 202: progress, or admission N; 409: the run shall stop
    POST /batches/STEP/tokens               int32 response indices -> a token block
    POST /evaluations/NAME                  start an evaluation
    GET  /evaluations/NAME?wait=S&after=N   200: its result; 202: as above
    POST /pushes/NUMBER                     hold the fleet for the weights that the body names
    GET  /pushes/NUMBER?attempt=N&wait=S    200: the servers of the attempt; 202: not yet
    POST /pushes/NUMBER/failed              a server failed in an attempt: the next one has the rest
    POST /pushes/NUMBER/done                the servers of an attempt have the weights
    POST /admissions/NUMBER/done            the servers of an admission have the weights, or failed

Every request needs the bearer token. A failure is a 500 with `error`, and `user`: whether the user can correct it.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.blocks import encode_block, encode_header, select
from dapo_megatron.rollout.jobs import Admissions, Batches, BudgetExhaustedError, Job, Work
from dapo_megatron.rollout.pushes import HoldMode, Pushes, Servers
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.sampler import Progress

__all__ = ["BudgetExhaustedError", "Service", "Status"]
logger = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
UNBEGUN_WAIT = 0.2
"""Seconds after which to ask again for what another rank has not begun yet."""

POLL_SECONDS = 0.2

T = TypeVar("T")


@dataclass
class Status:
    """`state` is starting, ready or failed; `user`: the user can correct the error.

    `healthy` of `total` servers have started; `message` is a log line of one that has not.
    """

    state: str = "starting"
    error: str = ""
    user: bool = False
    healthy: int = 0
    total: int = 0
    message: str = ""


@dataclass(frozen=True)
class Running:
    """What there is once the servers have started."""

    work: Work
    servers: Servers
    records: Records
    batches: Batches
    admissions: Admissions
    pushes: Pushes


class Service:
    """Routes, and the jobs behind them. Clients must send `token`."""

    def __init__(self, token: str):
        self.status = Status()
        self._token = token
        self._running: Running | None = None
        self._started = asyncio.Event()  # ready or failed
        self._failed = asyncio.Event()
        self._evaluations: dict[str, Job[dict[str, Any]]] = {}

    def ready(self, config: Config, work: Work, servers: Servers, records: Records) -> None:
        """Accept batches, evaluations and pushes from now on."""
        batches = Batches(work, config.rollout.staleness_bound, self.fail)

        async def settled() -> None:
            if config.rollout.pipeline == "one_step_off":
                await batches.settled(servers.any_ready, POLL_SECONDS)

        mode: HoldMode = config.fleet.on_push if config.rollout.pipeline == "async" else "wait"
        pushes = Pushes(servers, mode, settled, self.fail)
        self._running = Running(work, servers, records, batches, Admissions(servers.joining), pushes)
        self.status.state = "ready"
        self._started.set()

    def show(self, healthy: int, total: int, message: str) -> None:
        """Tell those who wait for the start how far it is; see `Status`."""
        self.status.healthy, self.status.total, self.status.message = healthy, total, message

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
        tasks: list[asyncio.Task[Any]] = [job.task for job in self._evaluations.values()]
        if (running := self._running) is not None:
            tasks += [job.task for job in running.batches.jobs.values()]
            tasks += running.pushes.tasks
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
                web.post(r"/pushes/{number:\d+}", self._begin_push),
                web.get(r"/pushes/{number:\d+}", self._get_push),
                web.post(r"/pushes/{number:\d+}/failed", self._push_failed),
                web.post(r"/pushes/{number:\d+}/done", self._push_done),
                web.post(r"/admissions/{number:\d+}/done", self._admitted),
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
        versions = await request.json()
        try:
            self._now().batches.begin(_number(request, "step"), int(versions["version"]), int(versions["trained"]))
        except ValueError as error:
            return _refused(str(error))
        return web.json_response({})

    async def _get_batch(self, request: web.Request) -> web.Response:
        step, batches = _number(request, "step"), self._now().batches
        reply = await self._unfinished(batches.jobs, step, request)
        if reply is not None:
            return reply
        header, _ = batches.jobs[step].task.result()
        batches.forget_before(step)
        return web.Response(body=await asyncio.to_thread(encode_header, header))

    async def _get_tokens(self, request: web.Request) -> web.Response:
        job = self._now().batches.jobs.get(_number(request, "step"))
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
            self._evaluations[name] = Job(asyncio.create_task(self._now().work.evaluate(progress)), progress)
        return web.json_response({})

    async def _get_evaluation(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        reply = await self._unfinished(self._evaluations, name, request)
        return reply or web.json_response(self._evaluations[name].task.result())

    async def _unfinished(self, jobs: dict[Any, Job[T]], key: object, request: web.Request) -> web.Response | None:
        """What to reply of a job that a rank waits for: its next admission or progress; None once it has a result.

        Raises:
            RuntimeError: when the controller fails meanwhile.
        """
        job, after = jobs.get(key), int(request.query.get("after", 0))
        if job is not None:
            self._now().admissions.offer(job)
        if job is None or len(job.admissions) <= after:
            await self._finished(job, _wait(request))
        if job is not None and len(job.admissions) > after:
            admission = job.admissions[after]
            return web.json_response({"admission": admission.number, "servers": _told(admission.servers)}, status=202)
        if job is None or not job.task.done():
            return web.json_response(asdict(job.progress if job else Progress()), status=202)
        return None

    async def _finished(self, job: Job[Any] | None, wait: float) -> None:
        """Wait until a job has finished, at most `wait` seconds; None: nobody has begun it yet."""
        failure = asyncio.ensure_future(self._failed.wait())
        awaited = [failure, job.task] if job else [failure]
        timeout = wait if job else min(wait, UNBEGUN_WAIT)
        try:
            await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure.cancel()
        if self._failed.is_set():
            raise RuntimeError(self.status.error)

    async def _begin_push(self, request: web.Request) -> web.Response:
        self._now().pushes.begin(_number(request), int((await request.json())["version"]))
        return web.json_response({})

    async def _get_push(self, request: web.Request) -> web.Response:
        attempt = int(request.query["attempt"])
        servers = await self._now().pushes.servers(_number(request), attempt, _wait(request))
        if self._failed.is_set():
            raise RuntimeError(self.status.error)
        if servers is None:
            return web.json_response({}, status=202)
        return web.json_response({"servers": _told(servers)})

    async def _push_failed(self, request: web.Request) -> web.Response:
        told = await request.json()
        self._now().pushes.failed(_number(request), told["attempt"], told["id"], told["reason"])
        return web.json_response({})

    async def _push_done(self, request: web.Request) -> web.Response:
        told, running = await request.json(), self._now()
        version, servers = running.pushes.done(_number(request), told["attempt"])
        running.records.add("push", version=version, servers=[server.id for server in servers], seconds=told["seconds"])
        return web.json_response({})

    async def _admitted(self, request: web.Request) -> web.Response:
        told, running = await request.json(), self._now()
        admission = running.admissions.close(_number(request))
        for server in admission.servers if admission else ():
            if server.id in told["ids"]:
                running.servers.admitted(server, told["version"])
            elif (reason := told["failed"].get(server.id)) is not None:
                running.servers.failed(server.id, reason)
        return web.json_response({})

    def _now(self) -> Running:
        if self._running is None:
            raise RuntimeError("the controller was asked for work before its servers were healthy")
        return self._running


def _number(request: web.Request, name: str = "number") -> int:
    return int(request.match_info[name])


def _wait(request: web.Request) -> float:
    return min(float(request.query.get("wait", 0)), LONGEST_WAIT)


def _told(servers: Sequence[Server]) -> list[dict[str, str]]:
    return [asdict(server) for server in servers]


def _refused(reason: str) -> web.Response:
    return web.json_response({"error": reason, "user": False}, status=400)
