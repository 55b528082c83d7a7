"""An engine for workers that does what the prompt's gold answer says, and tells which process it runs in."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from dapo_megatron.config.run import Config
from dapo_megatron.rollout.requests import AnswerTask, Generated, RequestError, Server
from dapo_megatron.types import Sample, Steps


class Obedient:
    """`versions` of what it says end with its process id, the requests it aborted and those that were cancelled."""

    def __init__(self) -> None:
        self.aborted = self.cancelled = self.steps = 0
        self.waiting: dict[str, asyncio.Event] = {}

    async def answer(self, server: Server, task: AnswerTask, on_tokens: Callable[[int], None]) -> Sample:
        match task.prompt.ground_truth:
            case "die":
                os._exit(7)
            case "break":
                raise ZeroDivisionError("by the test")
            case "fail":
                raise RequestError(f"server {server.url} failed", _more(task.so_far, server), "refused")
            case "wait":
                on_tokens(3)
                on_tokens(4)
                await self._wait(task, server)
        return self._sample(task, server)

    async def _wait(self, task: AnswerTask, server: Server) -> None:
        self.waiting[task.request_id] = asyncio.Event()
        try:
            await self.waiting[task.request_id].wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise RequestError("ended", _more(task.so_far, server), "aborted")

    async def abort(self, server: Server, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.aborted += 1
            self.waiting[request_id].set()

    def end_step(self, step: int) -> None:
        self.steps += step

    def _sample(self, task: AnswerTask, server: Server) -> Sample:
        more = _more(task.so_far, server)
        state = [os.getpid(), self.aborted, self.cancelled, self.steps]
        return Sample(
            token_ids=np.append(np.array(task.prompt.token_ids, np.int32), more.token_ids),
            log_probs=more.log_probs,
            finish_reason="length" if task.sampling.stop_token_ids else "stop",
            versions=np.append(more.versions, np.array(state, np.int32)),
            correct=task.by_rule,
            reward=-0.1,
            score=task.version / 3,
            reason=task.prompt.data_source,
            steps=Steps(np.array([1, 2], np.int32), np.array([0.5, np.nan], np.float32)),
            routes=more.routes,
        )


def _more(so_far: Generated, server: Server) -> Generated:
    return Generated(
        np.append(so_far.token_ids, np.int32(len(server.token))),
        np.append(so_far.log_probs, np.float32(-0.3)),
        np.append(so_far.versions, np.int32(9)),
        "partial",
        so_far.routes,
    )


@contextlib.asynccontextmanager
async def obedient(config: Config) -> AsyncIterator[Obedient]:
    yield Obedient()


@contextlib.asynccontextmanager
async def dies_at_once(config: Config) -> AsyncIterator[Obedient]:
    os._exit(5)
    yield Obedient()
