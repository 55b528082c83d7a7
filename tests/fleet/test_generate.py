"""Answers of a real server: the right tokens, the right log-probs, the right end."""

import asyncio
import time

import pytest
import torch
from transformers import Qwen2ForCausalLM

from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.requests import Generated, RequestError, Sampling
from tests.fleet.conftest import MAX_MODEL_LEN, RunningServer
from tests.fleet.tiny import END, load, log_probs

PROMPT = list(range(40, 100))


@pytest.fixture(scope="module")
def reference(running: RunningServer) -> Qwen2ForCausalLM:
    return load(running.model)


async def generate(running: RunningServer, sampling: Sampling, prompt: list[int] = PROMPT) -> Generated:
    async with ServerClient(running.url, running.token, timeout=60) as client:
        return await client.generate(prompt, sampling, request_id=f"test-{time.monotonic_ns()}")


def largest_difference(model: Qwen2ForCausalLM, answer: Generated, temperature: float = 1.0) -> float:
    expected = log_probs(model, PROMPT, answer.token_ids.tolist(), temperature)
    return float((expected - torch.tensor(answer.log_probs)).abs().max())


async def test_greedy_answer_is_that_of_transformers(running: RunningServer, reference: Qwen2ForCausalLM) -> None:
    answer = await generate(running, Sampling(max_tokens=24, temperature=0.0, ignore_eos=True))
    expected: list[int] = []
    for _ in range(24):
        logits = reference(torch.tensor([PROMPT + expected])).logits[0, -1]
        expected.append(int(logits.argmax()))
    assert answer.token_ids.tolist() == expected
    assert answer.finish_reason == "length"
    assert answer.versions.tolist() == [0] * 24
    assert largest_difference(reference, answer) < 1e-4


async def test_log_probs_are_those_of_the_sampled_distribution(
    running: RunningServer, reference: Qwen2ForCausalLM
) -> None:
    answer = await generate(running, Sampling(max_tokens=32, temperature=0.7, ignore_eos=True, seed=3))
    assert len(answer.token_ids) == len(answer.log_probs) == 32
    assert largest_difference(reference, answer, temperature=0.7) < 1e-4
    assert largest_difference(reference, answer, temperature=1.0) > 1e-2


async def test_seed_repeats_an_answer(running: RunningServer) -> None:
    same = [await generate(running, Sampling(max_tokens=16, ignore_eos=True, seed=7)) for _ in range(2)]
    other = await generate(running, Sampling(max_tokens=16, ignore_eos=True, seed=8))
    assert same[0].token_ids.tolist() == same[1].token_ids.tolist() != other.token_ids.tolist()


async def test_stop_token_ends_the_answer_and_stays_in_it(running: RunningServer) -> None:
    free = await generate(running, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
    stop = int(free.token_ids[5])
    answer = await generate(running, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,)))
    end = free.token_ids.tolist().index(stop) + 1
    assert answer.token_ids.tolist() == free.token_ids[:end].tolist()
    assert answer.log_probs == pytest.approx(free.log_probs[:end], abs=1e-4)
    assert answer.finish_reason == "stop"


async def test_end_token_ends_the_answer_and_stays_in_it(running: RunningServer) -> None:
    answers = await asyncio.gather(*[generate(running, Sampling(max_tokens=150, seed=seed)) for seed in range(16)])
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert ended, "none of 16 answers drew the end token"
    for answer in answers:
        assert (answer.token_ids[-1] == END) == (answer.finish_reason == "stop")
        assert END not in answer.token_ids[:-1]


async def test_aborted_answer_returns_what_there_is(running: RunningServer) -> None:
    sampling = Sampling(max_tokens=MAX_MODEL_LEN - len(PROMPT), ignore_eos=True)
    async with ServerClient(running.url, running.token, timeout=60) as client:
        task = asyncio.create_task(client.generate(PROMPT, sampling, request_id="to-be-aborted"))
        await asyncio.sleep(0.15)
        await client.abort(["to-be-aborted"], grace=5)
        with pytest.raises(RequestError) as caught:
            await task
    answer = caught.value.partial
    assert caught.value.kind == "aborted"
    assert len(answer.token_ids) == len(answer.log_probs) == len(answer.versions) < sampling.max_tokens


async def test_refused_request_names_server_and_reason(running: RunningServer) -> None:
    with pytest.raises(RequestError, match=rf"{running.url}.*maximum model length of {MAX_MODEL_LEN}"):
        await generate(running, Sampling(max_tokens=8), prompt=list(range(200)) * 2)


async def test_late_answer_is_a_request_error(running: RunningServer) -> None:
    async with ServerClient(running.url, running.token, timeout=0.02) as client:
        with pytest.raises(RequestError, match="TimeoutError"):
            await client.generate(PROMPT, Sampling(max_tokens=190, ignore_eos=True), request_id="late")


async def test_dead_server_is_not_healthy(running: RunningServer) -> None:
    async with ServerClient(running.url, running.token, timeout=10) as client:
        assert await client.health()
    async with ServerClient("http://127.0.0.1:9", running.token, timeout=10) as client:
        assert not await client.health()
