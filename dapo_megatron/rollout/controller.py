"""The rollout controller: a process of its own, so that answers are read and graded outside the trainer's interpreter.

`python -m dapo_megatron.rollout.controller --config FILE [--state FILE] --host ADDRESS --port-fd N` starts the vLLM
servers, loads the prompts and serves `dapo_megatron.rollout.service` on a free port of ADDRESS, which it writes to the
descriptor N. It ends, and its servers with it, when it is asked to, on SIGTERM or SIGINT, and when the process that
started it dies.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from dapo_megatron.config.run import Config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts, load_rows, tokenize
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.evaluation.evaluate import evaluate
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.processes import die_with_parent
from dapo_megatron.rewards import RewardFunction
from dapo_megatron.rewards.function import load_function
from dapo_megatron.rollout.address import PARENT_VARIABLE, TOKEN_VARIABLE
from dapo_megatron.rollout.blocks import BatchTokens, build_batch
from dapo_megatron.rollout.client import Sampling, ServerClient
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.generation import Grader, GroupGenerator
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.rollout.report import GroupReport, cost_stats
from dapo_megatron.rollout.sampler import Progress, Sampler
from dapo_megatron.rollout.server import Server, log_tail, stop_server, wait_until_healthy
from dapo_megatron.rollout.service import BudgetExhaustedError, Service
from dapo_megatron.serve import start
from dapo_megatron.types import BatchHeader

END_GRACE = 30.0
"""Seconds in which the controller ends after its parent died; stopping the servers takes up to a third of it."""

WATCH_SECONDS = 1.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Prompts and the order in which they are drawn."""

    train: Prompts
    held_out: Prompts | None
    cursor: PromptCursor


def load_data(config: Config, tokenizer: Tokenizer, state: dict[str, Any] | None) -> Data:
    """Load and tokenise all prompts; the cursor continues from `state`.

    Raises:
        UserError: when a data set cannot be used, or the training prompts are not those of the saved state.
    """
    limit = config.data.max_prompt_tokens
    train = tokenize(load_rows(config.data.train), tokenizer, limit)
    held_out = tokenize(load_rows(config.evaluation.data), tokenizer, limit) if config.evaluation.data else None
    for name, data in (("training", train), ("held-out", held_out)):
        if data is not None:
            counts = len(data.prompts), data.duplicates, data.too_long
            logger.info("%s prompts: %d; skipped: %d duplicates, %d too long", name, *counts)
    order = config.run.seed, config.data.shuffle
    cursor = PromptCursor(len(train.prompts), *order, train.fingerprint, config.rollout.history)
    if state:
        cursor.load_state_dict(state)
    return Data(train, held_out, cursor)


class RolloutWork:
    """Batches and evaluations over healthy servers, with twice as many answers in flight as servers can run."""

    def __init__(
        self, config: Config, data: Data, tokenizer: Tokenizer, fleet: Fleet, function: RewardFunction | None = None
    ):
        rollout, evaluation = config.rollout, config.evaluation
        self._config = config
        self._data = data
        self._architecture = architecture_of(config.model.path)
        self._journal = Journal(Path(config.run.dir) / "rollouts")
        self._report = GroupReport(self._journal.folder, tokenizer.decode)
        self._answers_in_flight = 2 * config.fleet.servers * config.fleet.max_num_seqs
        rules = tokenizer, config.data.reward, rollout.stop, config.algorithm.overlong, rollout.max_tokens
        self._grader = Grader(*rules, function)
        ends = tokenizer.end_token_ids(rollout.stop)
        training = Sampling(config.generation_limit, rollout.temperature, rollout.top_p, ends)
        held_out_sampling = Sampling(config.generation_limit, evaluation.temperature, evaluation.top_p, ends)
        self._sampler = Sampler(
            data.train.prompts,
            data.cursor,
            rollout,
            GroupGenerator(fleet, self._grader, training),
            self._answers_in_flight,
        )
        self._answer_held_out = GroupGenerator(fleet, Grader(*rules), held_out_sampling)

    async def sample(self, step: int, version: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        """Sample, record and return the batch of a step; `version` is that of the weights now in the servers."""
        sampled = await self._sampler.sample_batch(progress)
        self._grader.end_step(step)
        sampled.stats.update(cost_stats(sampled.draws, self._architecture, sampled.stats["seconds"]))
        await asyncio.to_thread(self._report.write, step, sampled.draws)
        if sampled.exhausted and self._config.rollout.on_exhausted == "stop":
            raise BudgetExhaustedError(
                f"step {step}: the whole budget of {sampled.stats['drawn']:.0f} prompts gave {len(sampled.groups)} of "
                f"the {progress.needed} groups needed, and rollout.on_exhausted is stop"
            )
        if sampled.exhausted:
            logger.warning("step %d: the budget ended at %d of %d groups", step, len(sampled.groups), progress.needed)
        header, tokens = build_batch(step, sampled.groups, sampled.stats, sampled.cursor)
        stale = (header.versions != version).any(axis=1)
        header.stats["stale_tokens"] = float(np.sum(header.response_lengths, where=stale))
        header.stats["exhausted"] = float(sampled.exhausted)
        header.stats["prompts_too_long"] = float(self._data.train.too_long)
        await asyncio.to_thread(self._journal.write, header, tokens)
        return header, tokens

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        """Accuracy on the held-out prompts."""
        if self._data.held_out is None:
            raise RuntimeError("an evaluation was asked for, but evaluation.data is not configured")
        samples = self._config.evaluation.samples
        in_flight = math.ceil(self._answers_in_flight / samples)
        return await evaluate(self._data.held_out.prompts, self._answer_held_out, samples, in_flight, progress)


class Controller:
    """Starts the servers and the prompts, then watches over them until the end."""

    def __init__(self, config: Config, state: dict[str, Any] | None, service: Service):
        self._config = config
        self._state = state
        self._service = service
        self._servers: list[Server] = []
        self._token = secrets.token_hex(32)
        service.status.total = config.fleet.servers

    async def run(self) -> None:
        """Serve until cancelled. An error ends the servers and is what every client gets from then on."""
        try:
            async with contextlib.AsyncExitStack() as clients:
                await self._run(clients)
        except Exception as error:
            self._service.fail(error)
            await asyncio.to_thread(self.stop_servers)

    async def _run(self, clients: contextlib.AsyncExitStack) -> None:
        config = self._config
        tokenizer = Tokenizer(config.model.path)
        target = config.data.reward_function
        function = await asyncio.to_thread(load_function, target) if target is not None else None
        for index in range(config.fleet.servers):
            self._servers.append(self._start(index))
        data = await asyncio.to_thread(load_data, config, tokenizer, self._state)
        await asyncio.gather(*map(self._wait_for, self._servers))
        connections = [
            await clients.enter_async_context(ServerClient(server.url, self._token, config.fleet.request_timeout))
            for server in self._servers
        ]
        work = RolloutWork(config, data, tokenizer, Fleet(connections, config.fleet.request_retries), function)
        self._service.ready(work, [(server.url, self._token) for server in self._servers])
        await self._watch()

    def _start(self, index: int) -> Server:
        """Start a server. From the main thread only: the kernel ends a server when the thread that started it ends."""
        config = self._config
        trainer_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this node; each of its ranks has one
        first_gpu = trainer_gpus if config.fleet.first_gpu is None else config.fleet.first_gpu
        return start(config, index, self._token, first_gpu=first_gpu + index * config.fleet.tensor)

    async def _wait_for(self, server: Server) -> None:
        def show(seconds: float, line: str) -> None:
            self._service.status.message = line

        seconds = await asyncio.to_thread(wait_until_healthy, server, self._config.fleet.start_timeout, show)
        self._service.status.healthy += 1
        logger.info("server %d is ready at %s after %.1f s", server.index, server.url, seconds)

    async def _watch(self) -> None:
        """Raise when a server ends: its answers would fail, and so would every weight push."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for server in self._servers:
                if (code := server.process.poll()) is not None:
                    tail = "\n".join(log_tail(server.log_path, 15))
                    raise RuntimeError(
                        f"vLLM server {server.index} ended with code {code}; the end of {server.log_path}:\n{tail}"
                    )

    def stop_servers(self) -> None:
        """End all servers and what they started. Safe to call twice."""
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                server.process.terminate()
        for server in self._servers:
            stop_server(server)


async def serve(config: Config, state: dict[str, Any] | None, token: str, host: str, port_fd: int) -> None:
    """Run the controller until it is asked to end."""
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    service = Service(token)
    runner = web.AppRunner(service.application(), access_log=None, shutdown_timeout=1)
    controller = Controller(config, state, service)
    running = None
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        running = asyncio.create_task(controller.run())
        os.write(port_fd, b"%d\n" % runner.addresses[0][1])
        os.close(port_fd)
        await end.wait()
    finally:
        if running is not None:
            running.cancel()
        await service.close()
        await asyncio.to_thread(controller.stop_servers)
        await runner.cleanup()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="Rollout controller; started by the trainer.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration, JSON")
    parser.add_argument("--state", type=Path, help="cursor of the run that is resumed, JSON")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port-fd", type=int, required=True, help="descriptor that the port is written to")
    options = parser.parse_args(arguments)
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)), END_GRACE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = Config.model_validate_json(options.config.read_bytes())
    state = json.loads(options.state.read_bytes()) if options.state else None
    asyncio.run(serve(config, state, os.environ.pop(TOKEN_VARIABLE), options.host, options.port_fd))


if __name__ == "__main__":
    main()
