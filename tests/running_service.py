"""The controller's HTTP interface over loopback, with batches made up here and servers that only write down."""

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from aiohttp import web

from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.config.run import Config
from dapo_megatron.rollout.address import Address
from dapo_megatron.rollout.blocks import BatchTokens
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.service import Service
from dapo_megatron.types import BatchHeader
from tests.unit.test_blocks import make_batch

TOKEN = "secret"


class ScriptedWork:
    """Batches of `make_batch`; an exception given for a step is raised; the batch of a step in `slow` has to wait."""

    def __init__(self) -> None:
        self.failures: dict[int, Exception] = {}
        self.slow: dict[int, asyncio.Event] = {}
        self.sampled: list[tuple[int, int, int]] = []
        self.evaluations = 0
        self.empty: set[int] = set()  # steps without responses

    async def sample(self, step: int, version: int, oldest: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        self.sampled.append((step, version, oldest))
        progress.needed, progress.kept, progress.answers = 4, 1, 9
        await (self.slow[step].wait() if step in self.slow else asyncio.sleep(0.01))
        if step in self.failures:
            raise self.failures[step]
        return make_batch([] if step in self.empty else [(3, [2, 4]), (2, [1, 5])], step)[:2]

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        self.evaluations += 1
        await (self.slow[0].wait() if 0 in self.slow else asyncio.sleep(0.01))
        return {"scores": [0.5, 1.0]}


class ScriptedServers:
    """Three servers, of which "c" joins; what is asked of them is written down."""

    def __init__(self) -> None:
        self.there = {id: Server(id, f"http://{id}", "server token") for id in "abc"}
        self.waiting = {"c"}
        self.calls: list[Any] = []
        self.held: asyncio.Event | None = None
        self.no_hope = False

    def healthy(self) -> list[Server]:
        return list(self.there.values())

    def joining(self) -> list[Server]:
        return [self.there[id] for id in sorted(self.waiting & self.there.keys())]

    def any_ready(self) -> bool:
        return not self.no_hope

    async def hold(self, mode: str) -> None:
        self.calls.append(("hold", mode))
        if self.held is not None and mode != "abort":
            await self.held.wait()

    def release(self, version: int, servers: Collection[Server]) -> None:
        self.calls.append(("release", version, "".join(server.id for server in servers)))
        self.waiting -= {server.id for server in servers}

    def admitted(self, server: Server, version: int) -> None:
        self.calls.append(("admitted", server.id, version))
        self.waiting.discard(server.id)

    def failed(self, id: str, reason: str) -> None:
        self.calls.append(("failed", id, reason))
        self.there.pop(id, None)


class RunningService:
    """A service on a loopback port, in an event loop on a thread. Nobody joins before a test says so."""

    def __init__(self, log_path: Path, config: Config) -> None:
        self.work, self.servers, self.config = ScriptedWork(), ScriptedServers(), config
        self.servers.waiting = set()
        self.records = Records(log_path.parent)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.address = Address(f"http://127.0.0.1:{self.call(self._start())}", TOKEN, log_path)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def _start(self) -> int:
        self.service = Service(TOKEN)
        self._runner = web.AppRunner(self.service.application(), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _ready(self) -> None:
        self.service.ready(self.config, self.work, self.servers, self.records)

    def ready(self, **rollout: str) -> None:
        self.config = self.config.model_copy(deep=True, update={"rollout": RolloutConfig(**rollout)})
        self.call(self._ready())

    def slow(self, step: int) -> None:
        """Let the batch of a step wait (0: evaluations)."""
        self.work.slow[step] = asyncio.Event()

    def go_on(self, step: int) -> None:
        """Complete it."""
        self.loop.call_soon_threadsafe(self.work.slow[step].set)

    def events(self) -> list[dict[str, Any]]:
        return list(read_records(self.records.path.parent))

    async def _fail(self, error: Exception) -> None:
        self.service.fail(error)

    def fail(self, error: Exception) -> None:
        self.call(self._fail(error))

    async def _stop(self) -> None:
        await self.service.close()
        await self._runner.cleanup()

    def stop(self) -> None:
        self.call(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def quiet(done: float, total: float, text: str) -> None:
    pass


def nobody(admission: Admission) -> None:
    raise AssertionError(f"{admission} was not expected")
