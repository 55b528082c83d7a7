"""Streams of a server's replies: what is kept of good ones, of bad ones, and of those that are cut off."""

import asyncio
import tokenize
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from unittest.mock import Mock

import aiohttp
import numpy as np
import pytest

from dapo_megatron.rollout.client import SPARE_BYTES, ServerClient, _payloads
from dapo_megatron.rollout.requests import NOTHING, UNKNOWN_VERSION, Generated, RequestError, Sampling
from dapo_megatron.sync.versions import parse_version
from tests.fake_server import TOKEN, VOCABULARY, FakeServer, Fault, continuation, log_prob, routes_of

PROMPT = [5, 6, 7]
SAMPLING = Sampling(max_tokens=10)
WHOLE = continuation(PROMPT, 10)


@pytest.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with FakeServer() as server:
        yield server


@pytest.fixture
async def client(fake: FakeServer) -> AsyncIterator[ServerClient]:
    async with ServerClient(fake.url, TOKEN, 60, VOCABULARY) as client:
        yield client


def part(count: int, version: int) -> Generated:
    ids = np.array(WHOLE[:count], np.int32)
    log_probs = np.array([log_prob(i) for i in WHOLE[:count]], np.float32)
    return Generated(ids, log_probs, np.full(count, version, np.int32), "partial")


def check(answer: Generated, count: int, versions: list[int], finish_reason: str) -> None:
    assert answer.token_ids.tolist() == WHOLE[:count]
    assert answer.log_probs == pytest.approx([log_prob(i) for i in WHOLE[:count]])
    assert answer.versions.tolist() == versions
    assert answer.finish_reason == finish_reason
    assert (answer.token_ids.dtype, answer.log_probs.dtype, answer.versions.dtype) == (np.int32, np.float32, np.int32)


async def test_answer_arrives_in_pieces(client: ServerClient, fake: FakeServer) -> None:
    counts: list[int] = []
    answer = await client.generate(PROMPT, SAMPLING, "a", on_tokens=counts.append)
    check(answer, 10, [3] * 10, "length")
    assert counts == [4, 4, 2]
    assert "cache_salt" not in fake.bodies[0] or fake.bodies[0]["cache_salt"] is None


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_lines_arrive_in_any_pieces(size: int) -> None:
    stream = b': ping\n\ndata: {"a": 1}\n\ndata: {"b": 2}\r\n\r\ndata: [DONE]\n\n'
    reader = aiohttp.StreamReader(Mock(), limit=2**16, loop=asyncio.get_running_loop())

    async def feed() -> None:
        for at in range(0, len(stream), size):
            reader.feed_data(stream[at : at + size])
            await asyncio.sleep(0)
        reader.feed_eof()

    feeding = asyncio.create_task(feed())
    assert [payload async for payload in _payloads(reader, 1000)] == [b'{"a": 1}', b'{"b": 2}']
    await feeding


async def test_answer_goes_on_from_what_is_there(client: ServerClient, fake: FakeServer) -> None:
    answer = await client.generate(PROMPT, SAMPLING, "a", so_far=part(6, 2), version=3)
    check(answer, 10, [2] * 6 + [3] * 4, "length")
    (body,) = fake.bodies
    assert body["token_ids"] == PROMPT + WHOLE[:6]
    assert body["sampling_params"]["max_tokens"] == 4
    assert body["cache_salt"] == "3"


STREAM_FAULTS: dict[Fault, str] = {
    "garbage": "not JSON",
    "truncated": "stream ended",
    "closes": "failed",
    "few_log_probs": "log-probs",
    "nan_log_probs": "log-prob",
    "null_log_probs": "log-prob",
    "too_many_tokens": "were asked for",
    "wrong_ids": "token ids",
    "strange_version": "weight version",
    "empty_choices": "0 choices",
    "no_ending": "stream ended",
    "error_chunk": "EngineCore encountered an issue",
    "aborts": "the server aborted it",
}


@pytest.mark.parametrize(("fault", "text"), STREAM_FAULTS.items())
async def test_bad_stream_is_a_failure_that_keeps_what_came_before(
    client: ServerClient, fake: FakeServer, fault: Fault, text: str
) -> None:
    fake.faults = [fault]
    with pytest.raises(RequestError, match=f"server {fake.url}.*{text}") as caught:
        await client.generate(PROMPT, SAMPLING, "a", version=2)
    assert caught.value.kind == "server"
    kept = {"strange_version": 8}.get(fault, 4)  # the message that is wrong is not kept
    check(caught.value.partial, kept, [3 if fault == "aborts" else 2] * kept, "partial")
    check(await client.generate(PROMPT, SAMPLING, "b", version=2), 10, [3] * 10, "length")  # the client still works


async def test_failure_before_the_first_token_keeps_what_there_was(client: ServerClient, fake: FakeServer) -> None:
    fake.faults = ["500"]
    with pytest.raises(RequestError, match=r"status 500, .*out of order") as caught:
        await client.generate(PROMPT, SAMPLING, "a", so_far=part(6, 2))
    assert caught.value.kind == "server"
    check(caught.value.partial, 6, [2] * 6, "partial")


@pytest.mark.parametrize(
    ("prompt", "faults"),
    [(PROMPT, ["400"]), (PROMPT, ["400_in_stream"]), ([VOCABULARY], []), ([-1], []), ([], [])],
    ids=str,
)
async def test_request_that_no_server_can_answer_is_refused(
    client: ServerClient, fake: FakeServer, prompt: list[int], faults: list[Fault]
) -> None:
    fake.faults = list(faults)
    with pytest.raises(RequestError) as caught:
        await client.generate(prompt, SAMPLING, "a")
    assert caught.value.kind == "refused"
    assert len(fake.bodies) == len(faults)


async def test_slow_stream_is_read(client: ServerClient, fake: FakeServer) -> None:
    fake.faults = ["drip"]
    check(await client.generate(PROMPT, SAMPLING, "a"), 10, [3] * 10, "length")


async def test_endless_reply_is_refused_in_bounded_memory(client: ServerClient, fake: FakeServer) -> None:
    fake.faults = ["huge"]
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"more than [0-9]+ bytes") as caught:
        await client.generate(PROMPT, SAMPLING, "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * SPARE_BYTES
    assert len(caught.value.partial.token_ids) == 4


async def test_late_answer_is_a_failure(fake: FakeServer) -> None:
    fake.faults = ["hangs"]
    async with ServerClient(fake.url, TOKEN, 0.5, VOCABULARY) as client:
        with pytest.raises(RequestError, match=r"TimeoutError.*0.5 s") as caught:
            await client.generate(PROMPT, SAMPLING, "a")
    assert caught.value.kind == "server"
    count = len(caught.value.partial.token_ids)  # 0 where the machine was too busy to send any
    check(caught.value.partial, count, [UNKNOWN_VERSION] * count, "partial")


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_aborted_answer_keeps_what_the_server_says_last(client: ServerClient, fake: FakeServer) -> None:
    fake.delay = 0.05
    tokens: list[int] = []
    task = asyncio.create_task(client.generate(PROMPT, SAMPLING, "a", version=2, on_tokens=tokens.append))
    await wait_for(lambda: tokens)
    await client.abort(["a", "unknown"], grace=5)
    assert task.done()
    with pytest.raises(RequestError) as caught:
        task.result()
    assert caught.value.kind == "aborted"
    count = sum(tokens)
    check(caught.value.partial, count, [3] * count, "partial")  # the server said the version
    assert fake.aborted == {"a"}


async def test_answer_of_a_frozen_server_is_given_up(client: ServerClient, fake: FakeServer) -> None:
    fake.faults, fake.answers_aborts = ["hangs"], False
    tokens: list[int] = []
    task = asyncio.create_task(client.generate(PROMPT, SAMPLING, "a", version=2, on_tokens=tokens.append))
    await wait_for(lambda: tokens)
    await client.abort(["a"], grace=0.1)
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.kind == "aborted"
    check(caught.value.partial, 4, [2] * 4, "partial")
    await client.abort([], grace=5)  # vLLM would abort everything
    assert not fake.aborted


async def test_cancelled_answer_closes_its_connection(client: ServerClient, fake: FakeServer) -> None:
    fake.faults = ["hangs"]
    tokens: list[int] = []
    task = asyncio.create_task(client.generate(PROMPT, SAMPLING, "a", on_tokens=tokens.append))
    await wait_for(lambda: tokens)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_for(lambda: fake.disconnected == 1)


async def test_facts(client: ServerClient, fake: FakeServer) -> None:
    facts = await client.facts()
    assert (facts.vllm, facts.weights, facts.world_size, facts.paused) == ("0.32.0", 3, 1, False)
    fake.open_to_all = True
    with pytest.raises(RequestError, match="opens without its token") as caught:
        await client.facts()
    assert caught.value.kind == "refused"


async def test_server_that_is_not_there() -> None:
    async with ServerClient("http://127.0.0.1:9", TOKEN, 60) as client:
        assert not await client.health()
        with pytest.raises(RequestError, match=r"http://127.0.0.1:9.*failed"):
            await client.facts()
        with pytest.raises(RequestError, match=r"http://127.0.0.1:9.*failed") as caught:
            await client.generate(PROMPT, SAMPLING, "a")
    assert caught.value.partial is NOTHING


async def test_routes_are_those_of_the_request_that_sampled_the_token(client: ServerClient, fake: FakeServer) -> None:
    fake.routes = True
    answer = await client.generate(PROMPT, SAMPLING, "a")
    assert answer.routes.dtype == np.int16
    assert answer.routes[:-1].tolist() == routes_of(PROMPT + WHOLE[:-1]).tolist()
    assert (answer.routes[-1] == -1).all()  # it was never fed back
    before = np.full((9, 2, 2), 500, np.int16)
    before[-1] = -1
    answer = await client.generate(PROMPT, SAMPLING, "b", so_far=replace(part(6, 2), routes=before))
    assert (answer.routes[:8] == 500).all()
    assert answer.routes[8:-1].tolist() == routes_of(PROMPT + WHOLE[:-1])[8:].tolist()
    assert len(answer.routes) == len(PROMPT) + 10


@pytest.mark.parametrize("error", [MemoryError, tokenize.TokenError, ValueError])
async def test_routes_that_cannot_be_read_are_a_failure(
    client: ServerClient, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    fake.routes = True
    monkeypatch.setattr(np, "load", load)
    with pytest.raises(RequestError, match=f"routed_experts cannot be read: {error.__name__}") as caught:
        await client.generate(PROMPT, SAMPLING, "a")
    assert caught.value.kind == "server"


def test_labels_of_weights_that_are_not_ours() -> None:
    assert [parse_version(label) for label in ("default", "0", "17", "999999999")] == [0, 0, 17, 999999999]
    for label in ("latest", "", "-5", "1_0", " 1", "1\n", "\u0661", "1000000000", "99999999999"):
        with pytest.raises(ValueError, match="is no weight version"):
            parse_version(label)


async def test_an_answer_may_be_given_up_twice(client: ServerClient, fake: FakeServer) -> None:
    fake.faults, fake.answers_aborts = ["hangs"], False
    tokens: list[int] = []
    task = asyncio.create_task(client.generate(PROMPT, SAMPLING, "a", on_tokens=tokens.append))
    await wait_for(lambda: tokens)
    arriving = client._running["a"]
    arriving.give_up()
    while arriving.limit is None or not arriving.limit.expired():
        await asyncio.sleep(0)
    arriving.give_up()
    with pytest.raises(RequestError):
        await task


async def test_routes_of_an_answer_that_was_cut_off_are_unknown_from_there_on(
    client: ServerClient, fake: FakeServer
) -> None:
    fake.routes, fake.faults = True, ["closes", "wrong_routes"]
    before = np.full((9, 2, 2), 500, np.int16)
    with pytest.raises(RequestError) as caught:
        await client.generate(PROMPT, replace(SAMPLING, max_tokens=16), "a", so_far=replace(part(6, 2), routes=before))
    routes = caught.value.partial.routes
    assert (len(caught.value.partial.token_ids), len(routes)) == (10, len(PROMPT) + 10)
    assert (routes[:9] == 500).all()
    assert (routes[9:] == -1).all()
    with pytest.raises(RequestError, match="routed_experts are"):
        await client.generate(PROMPT, SAMPLING, "b")
