"""A worker: a process that talks to its share of the servers and grades their answers, for the controller.

`python -m dapo_megatron.rollout.worker_process --socket FD --parent PID --index N --engine MODULE:FUNCTION` is started
by `dapo_megatron.rollout.worker`, which it obeys over the socket FD, and with which it ends.
"""

import argparse
import asyncio
import contextlib
import importlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.processes import die_with_parent
from dapo_megatron.rewards.function import load_function
from dapo_megatron.rollout.engine import LocalEngine
from dapo_megatron.rollout.frames import Arrays, Channel, pack_generated, pack_sample, unpack_task
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.requests import Engine, RequestError, Server

END_GRACE = 5.0
TOKENS_EVERY = 0.2
"""Seconds between two messages of how many tokens have arrived."""

MakeEngine = Callable[[Config], AbstractAsyncContextManager[Engine]]


def local_engine(config: Config) -> LocalEngine:
    """The engine of a run.

    Raises:
        UserError: when the tokenizer or the reward function cannot be loaded.
    """
    rollout, target = config.rollout, config.data.reward_function
    function = load_function(target) if target is not None else None
    tokenizer = Tokenizer(config.model.path)
    grader = Grader(
        tokenizer, config.data.reward, rollout.stop, config.algorithm.overlong, rollout.max_tokens, function
    )
    return LocalEngine(grader, config.fleet.request_timeout, architecture_of(config.model.path).vocab_size)


class Worker:
    """Does what comes over `channel` with `engine`."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._tasks: dict[int, asyncio.Task[None]] = {}  # under the number of the call
        self._tokens: Counter[int] = Counter()  # that arrived for a call and were not told of yet

    async def run(self) -> None:
        """Serve until the controller is gone."""
        telling = asyncio.create_task(self._tell_tokens())
        while (frame := await self._channel.receive()) is not None:
            self._obey(*frame)
        telling.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(telling, *self._tasks.values(), return_exceptions=True)

    def _obey(self, header: dict[str, Any], arrays: Arrays) -> None:
        match header["kind"]:
            case "answer":
                self._start(header["call"], self._answer(header, arrays))
            case "abort":
                self._start(header["call"], self._abort(header))
            case "cancel":
                if (task := self._tasks.get(header["call"])) is not None:
                    task.cancel()
            case "end_step":
                self._engine.end_step(header["step"])

    def _start(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[call] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(call))

    async def _answer(self, header: dict[str, Any], arrays: Arrays) -> None:
        call = header["call"]
        server, task = unpack_task(header, arrays)
        try:
            sample = await self._engine.answer(server, task, lambda count: self._tokens.update({call: count}))
            members, reply = pack_sample(sample)
            kind = "sample"
        except RequestError as error:
            members, reply = pack_generated(error.partial)
            kind, members = "request_error", members | {"text": str(error), "error_kind": error.kind}
        except Exception as error:  # a fault of ours: the controller shall end with it, not this process
            logging.exception("an answer failed")
            kind, members, reply = "broken", {"text": repr(error)}, []
        finally:
            self._tokens.pop(call, None)
        await self._channel.send(kind, members | {"call": call}, reply)

    async def _abort(self, header: dict[str, Any]) -> None:
        await self._engine.abort(Server(**header["server"]), header["request_ids"])
        await self._channel.send("aborted", {"call": header["call"]})

    async def _tell_tokens(self) -> None:
        while True:
            await asyncio.sleep(TOKENS_EVERY)
            if self._tokens:
                counts, self._tokens = list(self._tokens.items()), Counter()
                await self._channel.send("tokens", {"counts": counts})


async def _serve(end: socket.socket, make_engine: MakeEngine) -> None:
    channel = await Channel.open(end)
    frame = await channel.receive()
    if frame is None:
        return
    try:
        opened = make_engine(Config.model_validate(frame[0]["config"]))
    except Exception as error:
        await channel.send("failed", {"text": str(error), "user": isinstance(error, UserError)})
        return
    async with opened as engine:
        # The controller may be gone already, and this process ends with it.
        with contextlib.suppress(ConnectionError):
            await channel.send("ready")
            await Worker(channel, engine).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="Rollout worker; started by the controller.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--engine", required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent, END_GRACE)
    prefix = f"%(asctime)s %(levelname)s worker {options.index}: %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=prefix)
    module, _, function = options.engine.partition(":")
    make_engine = cast(MakeEngine, getattr(importlib.import_module(module), function))
    asyncio.run(_serve(socket.socket(fileno=options.socket), make_engine))


if __name__ == "__main__":
    main()
