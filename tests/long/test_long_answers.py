"""An answer of the paper's 20,480 tokens from a real server into a batch, by a worker, with a push in its middle."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.run import Config
from dapo_megatron.rollout.blocks import build_batch, decode_block, encode_block, select
from dapo_megatron.rollout.fleet import Answer, AnswerGroup, Fleet
from dapo_megatron.rollout.records import Records, read_records
from dapo_megatron.rollout.requests import Sampling, Server
from dapo_megatron.rollout.server import start_server, stop_server, wait_until_healthy
from dapo_megatron.rollout.worker import WorkerPool
from dapo_megatron.types import Group, Prompt, Sample
from tests.fleet.conftest import START_SECONDS, write_task
from tests.fleet.test_run import sections
from tests.fleet.tiny import load, log_probs, write_tiny_model

TOKENS = 20_480
PROMPT = Prompt(0, tuple(range(40, 100)), "")
SECONDS = 600
pytestmark = pytest.mark.timeout(START_SECONDS + SECONDS + 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("run")
    fleet = FleetConfig(dtype="float32", kv_cache_gb=0.1, max_num_seqs=1)
    return Config.model_validate(sections(model, write_task(model, folder), fleet, folder))


@pytest.fixture(scope="module")
def server(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    longest = len(PROMPT.token_ids) + TOKENS
    started = start_server(
        model=config.model.path,
        index=0,
        port=None,
        fleet=config.fleet,
        max_model_len=longest,
        seed=1,
        log_path=tmp_path_factory.mktemp("logs") / "server.log",
        token="long",
        hf_overrides={"max_position_embeddings": longest},
    )
    try:
        wait_until_healthy(started, timeout=START_SECONDS)
        yield Server("s0", started.url, "long")
    finally:
        stop_server(started)


async def generated(config: Config, server: Server) -> Sample:
    """The answer, ended for a push once half of it is there."""
    async with asyncio.timeout(SECONDS), WorkerPool(config, 1) as pool:
        fleet = Fleet(pool, config.fleet, Records(config.run.dir))
        fleet.add(server, 0)
        answer = Answer(AnswerGroup(0, PROMPT, 1, Sampling(TOKENS, ignore_eos=True)), 0, "long")
        answering = asyncio.create_task(fleet.answer(answer))
        while answer.tokens < TOKENS // 2 and not answering.done():
            await asyncio.sleep(0.05)
        await fleet.hold("abort")
        fleet.release(0, ["s0"])
        sample = await answering
        await fleet.close()
    return sample


def test_the_longest_answer_comes_whole(config: Config, model: Path, server: Server) -> None:
    started = time.monotonic()
    sample = asyncio.run(generated(config, server))
    seconds = time.monotonic() - started
    assert (len(sample.token_ids), sample.finish_reason) == (TOKENS, "length")
    assert sample.versions.tolist() == [0] * TOKENS
    aborted, finished = [record for record in read_records(config.run.dir) if record["kind"] == "attempt"]
    assert (aborted["ended"], finished["ended"]) == ("aborted", "finished")
    assert TOKENS // 2 <= finished["tokens_before"] == aborted["tokens_after"] < TOKENS
    header, tokens = build_batch(1, [Group(0, PROMPT, (sample,))], {}, {})
    data = encode_block(select(header, tokens, np.zeros(1, np.int32)))
    block = decode_block(data)
    assert block.response_tokens.tolist() == sample.token_ids.tolist()
    expected = log_probs(load(model), list(PROMPT.token_ids), block.response_tokens.tolist())
    assert torch.tensor(block.rollout_log_probs).sub(expected).abs().max() < 1e-3
    print(f"{TOKENS} tokens in {seconds:.0f} s, {TOKENS / seconds:.0f} a second; {len(data)} bytes of the batch")
