"""The engine's connections: one client for a server's answers, and none for a server without any."""

import asyncio
from typing import Any

import pytest

from dapo_megatron.rollout import engine as module
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.engine import LocalEngine
from dapo_megatron.rollout.requests import AnswerTask, RequestError, Sampling
from dapo_megatron.types import Prompt
from tests.fake_server import VOCABULARY, FakeServer, Fault


class Ungraded:
    """Passes on what was generated."""

    def sample(self, generated: Any, prompt: Prompt, by_rule: bool) -> Any:
        return generated


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ServerClient]:
    """All clients that the engine makes."""
    opened: list[ServerClient] = []

    class Noted(ServerClient):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(module, "ServerClient", Noted)
    return opened


def closed(client: ServerClient) -> bool:
    return client._session is not None and client._session.closed


def answer(engine: LocalEngine, server: FakeServer, name: str) -> "asyncio.Task[Any]":
    task = AnswerTask(name, Prompt(0, (1, 2), ""), Sampling(max_tokens=20))
    return asyncio.create_task(engine.answer(server.server, task, lambda count: None))


async def test_a_client_serves_the_answers_under_way_and_ends_with_the_last(opened: list[ServerClient]) -> None:
    grader: Any = Ungraded()
    async with FakeServer(delay=0.01) as server, FakeServer("other") as other, LocalEngine(grader, 60, VOCABULARY) as e:
        first, second = answer(e, server, "a"), answer(e, server, "b")
        await answer(e, other, "c")
        await first
        await second
        assert [client.url for client in opened] == [server.url, other.url]
        assert all(map(closed, opened))
        await answer(e, server, "d")  # the server is still there, or again
        assert len(opened) == 3
        assert closed(opened[2])
        await e.abort(server.server, ["a"])  # nobody is asked
        assert "/abort_requests" not in server.calls


@pytest.mark.parametrize("fails", [True, False])
async def test_an_answer_that_fails_or_is_cancelled_leaves_nothing_open(
    opened: list[ServerClient], fails: bool
) -> None:
    grader: Any = Ungraded()
    faults: list[Fault] = ["500"] if fails else ["hangs"]
    async with FakeServer(faults=faults) as server, LocalEngine(grader, 60, VOCABULARY) as engine:
        task = answer(engine, server, "a")
        while not server.bodies:
            await asyncio.sleep(0.01)
        if not fails:
            assert not closed(opened[0])
            task.cancel()
        with pytest.raises((RequestError, asyncio.CancelledError)):
            await task
        assert closed(opened[0])
