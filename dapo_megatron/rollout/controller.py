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
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.processes import die_with_parent
from dapo_megatron.rewards.function import load_function
from dapo_megatron.rollout.address import PARENT_VARIABLE, TOKEN_VARIABLE
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.server import Server, log_tail, stop_server, wait_until_healthy
from dapo_megatron.rollout.service import Service
from dapo_megatron.rollout.work import RolloutWork, load_data
from dapo_megatron.serve import start

END_GRACE = 30.0
"""Seconds in which the controller ends after its parent died; stopping the servers takes up to a third of it."""

WATCH_SECONDS = 1.0
logger = logging.getLogger(__name__)


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
