"""A fleet of scripted servers, and what happens to it."""

import asyncio
import random
from pathlib import Path
from typing import Any

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.fleet import Answer, AnswerGroup, Fleet
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.types import Prompt, Sample
from tests.scripted_engine import STOP, ScriptedEngine, ScriptedServer, script

SAMPLING = Sampling(max_tokens=30, stop_token_ids=(STOP,))
RETRIES = 4


class World:
    """The fleet, and everything that a test does to its servers or asks of it."""

    def __init__(self, folder: Path, seed: int = 0, servers: int = 2, failing: float = 0.0, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.engine = ScriptedEngine(self.rng, failing)
        self.folder = folder
        self.version = 1
        self.suspects: list[tuple[str, str]] = []
        settings = {"request_retries": RETRIES, "stall_timeout": 20.0, "health_every": 2.0} | config
        self.fleet = Fleet(
            self.engine, FleetConfig.model_validate(settings), Records(folder), self.engine.connect, pause=0.1
        )
        self.fleet.on_suspect = self._suspect
        self.urls = 0
        for number in range(servers):
            self.start(f"s{number}")

    def _suspect(self, id: str, reason: str) -> None:
        self.suspects.append((id, reason))

    def start(self, id: str, ready: bool = True) -> ScriptedServer:
        self.urls += 1
        server = self.engine.start(id, f"http://{id}:{self.urls}")
        server.version = self.version if ready else None
        self.fleet.add(server.server, server.version)
        return server

    def server(self, id: str) -> ScriptedServer:
        """The newest of this name."""
        return [server for server in self.engine.servers.values() if server.server.id == id][-1]

    def group(self, prompt: int = 7, size: int = 4, draw: int = 0) -> AnswerGroup:
        return AnswerGroup(draw, Prompt(prompt, (prompt, 1), ""), size, SAMPLING)

    def answers(self, group: AnswerGroup) -> list["asyncio.Task[Sample]"]:
        return [
            asyncio.create_task(self.fleet.answer(Answer(group, index, f"p{group.prompt.id}-{index}")))
            for index in range(group.size)
        ]

    async def push(self, mode: Any, lost: str | None = None) -> None:
        await self.fleet.hold(mode)
        await asyncio.sleep(self.rng.random() * 3)
        if lost is not None:
            self.fleet.remove(lost, "it was late in a push")
        self.version += 1
        ids = {member.id for member in self.fleet.members()}
        for id in ids:
            self.server(id).version = self.version
        self.fleet.release(self.version, ids)

    def check(self, sample: Sample, prompt: int = 7) -> None:
        """It is exactly what the script says, and no token is said to be newer than it is."""
        ids, versions = sample.token_ids.tolist(), sample.versions.tolist()
        assert ids == script(prompt, ids[0])
        true = -sample.log_probs
        assert (sample.versions <= true).all()
        assert versions == sorted(versions)
        assert sample.versions.min() >= 1

    async def settled(self) -> None:
        """Nothing is left running or counted."""
        await self.fleet.close()
        for member in self.fleet.members():
            assert (member.answers, member.tokens, member.oldest, member.quiet) == (0, 0, None, None)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def attempts(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.folder) if record["kind"] == "attempt"]
