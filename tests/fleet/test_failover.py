"""Answers of a real server that are cut off in the middle and go on from what had arrived."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.run import Config
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.engine import LocalEngine
from dapo_megatron.rollout.fleet import Answer, AnswerGroup, Fleet
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Generated, RequestError, Sampling, Server
from dapo_megatron.rollout.worker import WorkerPool
from dapo_megatron.types import Prompt, Sample
from tests.fleet.conftest import MAX_MODEL_LEN, RunningServer
from tests.fleet.test_run import sections
from tests.fleet.tiny import VOCABULARY

PROMPT = Prompt(0, tuple(range(40, 100)), "")
TOKENS = MAX_MODEL_LEN - len(PROMPT.token_ids)
GREEDY = Sampling(TOKENS, temperature=0.0, ignore_eos=True)


class Ungraded:
    """Takes every answer for right."""

    def sample(self, answer: Generated, prompt: Prompt, by_rule: bool = False) -> Sample:
        return Sample(answer.token_ids, answer.log_probs, answer.finish_reason, answer.versions, True, 1.0, 1.0)


class Wire:
    """TCP connections to the server that break: each carries as many bytes of replies as the next of `limits`."""

    def __init__(self, server: Server) -> None:
        self._host, _, port = server.url.removeprefix("http://").partition(":")
        self._port = int(port)
        self.limits = itertools.repeat(2**40)
        self.cut = 0

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limit = next(self.limits)
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        sending = asyncio.create_task(self._pump(reader, far_writer, 2**40))
        if not await self._pump(far_reader, writer, limit):
            self.cut += 1
            writer.transport.abort()
        sending.cancel()
        far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> bool:
        """Whether everything went through."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**12):
                writer.write(data[:limit])
                await writer.drain()
                limit -= len(data)
                if limit <= 0:
                    return False
            writer.close()
        return True


async def metric(running: RunningServer, name: str) -> float:
    """A number that the server counts."""
    token = {"Authorization": f"Bearer {running.token}"}
    async with aiohttp.ClientSession(headers=token) as session, session.get(f"{running.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


@pytest.fixture
async def version(running: RunningServer) -> int:
    """The version of the server's weights, which other tests change."""
    async with ServerClient(running.url, running.token, timeout=60) as client:
        return (await client.facts()).weights


@pytest.fixture
async def uninterrupted(running: RunningServer) -> Generated:
    async with ServerClient(running.url, running.token, timeout=60, vocabulary=VOCABULARY) as client:
        return await client.generate(PROMPT.token_ids, GREEDY, "uninterrupted")


def check(answer: Sample, expected: Generated, version: int) -> None:
    assert answer.token_ids.tolist() == expected.token_ids.tolist()
    assert answer.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    assert answer.versions.tolist() == [version] * TOKENS
    assert answer.finish_reason == "length"


@contextlib.asynccontextmanager
async def fleet_of(server: Server, version: int, folder: Path) -> AsyncIterator[Fleet]:
    async with LocalEngine(Ungraded(), 60, VOCABULARY) as engine:  # type: ignore[arg-type]
        fleet = Fleet(engine, FleetConfig(request_retries=3), Records(folder), pause=0.01)
        fleet.add(server, version)
        yield fleet
        await fleet.close()


async def test_broken_connections_leave_no_trace_in_an_answer(
    running: RunningServer, version: int, uninterrupted: Generated, tmp_path: Path
) -> None:
    async with Wire(Server("s0", running.url, running.token)) as wire:
        wire.limits = itertools.chain([2**13, 2**13 + 2**12], itertools.repeat(2**40))
        async with fleet_of(Server("s0", wire.url, running.token), version, tmp_path) as fleet:
            sample = await fleet.answer(Answer(AnswerGroup(0, PROMPT, 1, GREEDY), 0, "broken"))
    check(sample, uninterrupted, version)
    assert wire.cut == 2
    attempts = [record for record in read_records(tmp_path) if record["kind"] == "attempt"]
    assert [record["ended"] for record in attempts] == ["failed", "failed", "finished"]
    assert 0 < attempts[1]["tokens_before"] < attempts[2]["tokens_before"] < TOKENS


async def received(fleet: Fleet, answer: Answer) -> None:
    """Wait until tokens of an answer are there."""
    while not answer.tokens:
        await asyncio.sleep(0.005)


Interruption = Callable[[Fleet, Server, int], Awaitable[None]]


async def _abort_around_push(fleet: Fleet, server: Server, version: int) -> None:
    await fleet.hold("abort")
    fleet.release(version, [server.id])


async def _keep_around_push(fleet: Fleet, server: Server, version: int) -> None:
    await fleet.hold("keep")
    fleet.release(version, [server.id])


async def _leave_and_join(fleet: Fleet, server: Server, version: int) -> None:
    fleet.remove(server.id, "taken out")
    fleet.add(server, version)


@pytest.mark.parametrize("interrupt", [_abort_around_push, _keep_around_push, _leave_and_join])
async def test_interrupted_answer_is_the_uninterrupted_one(
    running: RunningServer, version: int, uninterrupted: Generated, tmp_path: Path, interrupt: Interruption
) -> None:
    server = Server("s0", running.url, running.token)
    async with fleet_of(server, version, tmp_path) as fleet:
        answer = Answer(AnswerGroup(0, PROMPT, 1, GREEDY), 0, f"interrupted-{interrupt.__name__}")
        task = asyncio.create_task(fleet.answer(answer))
        await received(fleet, answer)
        await interrupt(fleet, server, version)
        check(await task, uninterrupted, version)
    attempts = [record for record in read_records(tmp_path) if record["kind"] == "attempt"]
    assert len(attempts) == (1 if interrupt is _keep_around_push else 2)
    if len(attempts) == 2:
        assert 0 < attempts[1]["tokens_before"] < TOKENS  # it was interrupted in the middle, and went on from there


async def begun(answers: list[Answer], attempt: int) -> None:
    """Wait until an attempt of each answer is under way."""
    while not all(answer.attempts == attempt and answer.attempt for answer in answers):
        await asyncio.sleep(0.005)


async def test_answers_of_a_worker_outlive_pushes_and_its_death(
    running: RunningServer, version: int, uninterrupted: Generated, task: Path, tmp_path: Path
) -> None:
    server = Server("s0", running.url, running.token)
    config = Config.model_validate(sections(running.model, task, FleetConfig(), tmp_path / "run"))
    async with WorkerPool(config, 1) as pool, asyncio.timeout(200):
        fleet = Fleet(pool, FleetConfig(request_retries=1), Records(tmp_path), pause=0.01)
        fleet.add(server, version)
        answers = [Answer(AnswerGroup(0, PROMPT, 3, GREEDY), index, f"worker-{index}") for index in range(3)]
        tasks = [asyncio.create_task(fleet.answer(answer)) for answer in answers]
        await received(fleet, answers[0])
        await _abort_around_push(fleet, server, version)
        await begun(answers, attempt=2)
        (worker,) = [p for p in psutil.Process().children() if "dapo_megatron.rollout.worker_process" in p.cmdline()]
        worker.kill()
        for sample in await asyncio.gather(*tasks):
            check(sample, uninterrupted, version)
        await fleet.close()
    attempts = [record for record in read_records(tmp_path) if record["kind"] == "attempt"]
    ends = [[record["ended"] for record in attempts if record["index"] == index] for index in range(3)]
    assert ends == [["aborted", "failed", "finished"]] * 3
    before = [record["tokens_before"] for record in attempts if record["ended"] == "finished"]
    assert all(0 < tokens < TOKENS for tokens in before)  # what the abort left is not lost with the worker


async def test_cancelled_answer_ends_on_the_server(running: RunningServer) -> None:
    tokens: list[int] = []
    async with ServerClient(running.url, running.token, timeout=60, vocabulary=VOCABULARY) as client:
        task = asyncio.create_task(
            client.generate(PROMPT.token_ids, Sampling(TOKENS, ignore_eos=True), "cancelled", on_tokens=tokens.append)
        )
        while not tokens:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(30):
            while await metric(running, "num_requests_running"):
                await asyncio.sleep(0.05)
    assert sum(tokens) < TOKENS


async def test_server_refuses_who_has_no_token(running: RunningServer) -> None:
    async with ServerClient(running.url, "guessed", timeout=60) as client:
        with pytest.raises(RequestError, match="401"):
            await client.facts()
    async with ServerClient(running.url, running.token, timeout=60) as client:
        facts: Any = await client.facts()
    assert (facts.world_size, facts.paused) == (1, False)
