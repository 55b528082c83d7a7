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
from dapo_megatron.rollout.address import PARENT_VARIABLE, TOKEN_VARIABLE
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.service import Service
from dapo_megatron.rollout.supervisor import Supervisor
from dapo_megatron.rollout.work import RolloutWork, load_data
from dapo_megatron.rollout.worker import open_engine
from dapo_megatron.serve import read_token

END_GRACE = 30.0
"""Seconds in which the controller ends after its parent died; stopping the servers takes up to a third of it."""


class Controller:
    """Puts the parts together: engine, fleet, the servers and who looks after them, and the sampling on top."""

    def __init__(self, config: Config, state: dict[str, Any] | None, service: Service):
        self._config = config
        self._state = state
        self._service = service

    async def run(self) -> None:
        """Serve until cancelled. An error ends the servers and is what every client gets from then on."""
        async with contextlib.AsyncExitStack() as parts:
            try:
                await self._run(parts)
            except Exception as error:
                self._service.fail(error)

    async def _run(self, parts: contextlib.AsyncExitStack) -> None:
        config = self._config
        tokenizer = Tokenizer(config.model.path)
        engine = await parts.enter_async_context(open_engine(config))
        records = Records(Path(config.run.dir) / "rollouts")
        parts.callback(records.close)
        fleet = Fleet(engine, config.fleet, records)
        parts.push_async_callback(fleet.close)
        supervisor = Supervisor(config, fleet, records, self._token(), self._service.show)
        parts.push_async_callback(supervisor.close)
        fleet.on_suspect = supervisor.suspect
        supervisor.start()
        data = await asyncio.to_thread(load_data, config, tokenizer, self._state)
        await supervisor.all_joined()
        work = RolloutWork(config, data, tokenizer, fleet, engine, records)
        self._service.ready(config, work, supervisor, records)
        parts.push_async_callback(self._service.close)
        await supervisor.watch()

    def _token(self) -> str:
        """Opens the servers: a new one for those that the run starts."""
        fleet = self._config.fleet
        return read_token(None, fleet.token_env) if fleet.mode == "external" else secrets.token_hex(32)


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
            await asyncio.wait([running])
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
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would tell of every request
    config = Config.model_validate_json(options.config.read_bytes())
    state = json.loads(options.state.read_bytes()) if options.state else None
    asyncio.run(serve(config, state, os.environ.pop(TOKEN_VARIABLE), options.host, options.port_fd))


if __name__ == "__main__":
    main()
