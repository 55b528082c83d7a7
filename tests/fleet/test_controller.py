"""Rollouts with real servers: batches, evaluations, recordings, and how everything ends."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fleet.conftest import MAX_MODEL_LEN, RunningServer
from tests.fleet.tiny import load, log_probs

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.controller import RolloutWork, load_data
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, Replay, open_rollouts
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.service import BudgetExhaustedError

MAX_TOKENS = 2
LEAST_SHARE, MOST_SHARE = 0.15, 0.85


def quiet(done: float, total: float, text: str) -> None:
    pass


@pytest.fixture(scope="session")
def task(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose gold answer is a character that the random model says next now and then, but not always."""
    model, tokenizer = load(tiny_model), Tokenizer(tiny_model)
    rows = []
    for number in range(200):
        prompt = f"{number:03d}" * 12
        ids = tokenizer.encode_prompts([prompt])[0]
        with torch.no_grad():
            shares = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
        best = int(shares[:94].argmax())  # the printable characters of ASCII stand first
        if LEAST_SHARE < shares[best] < MOST_SHARE:
            rows.append({"prompt": prompt, "reward_model": {"ground_truth": tokenizer.decode([best])}})
    assert len(rows) >= 10, "the random model is too sure or too unsure everywhere"
    path = tmp_path_factory.mktemp("task") / "task.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(model: Path, task: Path, fleet: FleetConfig, run_dir: Path, **rollout: object) -> Config:
    """Single-character answers: every character is a stop string, so that the first token ends the answer."""
    return Config.model_validate(
        {
            "run": {"dir": str(run_dir), "steps": 4},
            "model": {"path": str(model)},
            "data": {"train": {"path": str(task)}, "max_prompt_tokens": MAX_MODEL_LEN - MAX_TOKENS, "reward": "exact"},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_tokens": 1, "max_rounds": 20} | rollout,
            "training": {"mini_batch": 32, "micro_batch_tokens": 1024},
            "fleet": fleet.model_dump(),
            "evaluation": {"data": {"path": str(task), "limit": 6}, "samples": 3},
        }
    )


@pytest.fixture
def work(running: RunningServer, task: Path, tiny_fleet: FleetConfig, tmp_path: Path) -> Iterator["Bench"]:
    yield Bench(make_config(running.model, task, tiny_fleet, tmp_path / "run"), running)


class Bench:
    """`RolloutWork` on the shared server, in this process."""

    def __init__(self, config: Config, running: RunningServer) -> None:
        self.config, self.running = config, running

    async def __aenter__(self) -> RolloutWork:
        tokenizer = Tokenizer(self.config.model.path)
        self._client = ServerClient(self.running.url, self.running.token, timeout=60)
        await self._client.__aenter__()
        data = load_data(self.config, tokenizer, None)
        return RolloutWork(self.config, data, tokenizer, Fleet([self._client], retries=1))

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()


async def version_of(work: RolloutWork) -> int:
    """The weight version now in the shared server, which other tests change."""
    header, _ = await work.sample(0, 0, Progress())
    return int(header.versions[0, 0])


async def test_a_batch_holds_mixed_groups_with_the_log_probs_of_the_model(work: Bench) -> None:
    async with work as rollouts:
        version = await version_of(rollouts)
        header, tokens = await rollouts.sample(1, version, Progress())
    assert len(header.draws) == 4
    right = np.bincount(header.groups, weights=header.correct)
    assert ((right > 0) & (right < 8)).all()
    assert header.stats["stale_tokens"] == 0
    assert header.stats["drawn"] == sum(header.stats[k] for k in ("kept", "all_right", "all_wrong", "failed", "requeued"))
    assert (header.versions == version).all()
    assert np.isfinite(tokens.rollout_log_probs).all()
    assert (tokens.rollout_log_probs <= 0).all()
    np.testing.assert_array_equal(header.rewards, np.where(header.correct, 1, -1))


async def test_tokens_of_another_version_are_counted(work: Bench) -> None:
    async with work as rollouts:
        version = await version_of(rollouts)
        header, _ = await rollouts.sample(1, version + 1, Progress())
    assert header.stats["stale_tokens"] == header.response_lengths.sum()


async def test_each_batch_is_recorded(work: Bench) -> None:
    async with work as rollouts:
        header, tokens = await rollouts.sample(1, 0, Progress())
    with Replay(Path(work.config.run.dir) / "rollouts") as replay:
        recorded = replay.wait(1, quiet)
        block = replay.tokens(1, np.arange(header.num_responses, dtype=np.int32))
    np.testing.assert_array_equal(recorded.rewards, header.rewards)
    assert recorded.cursor == header.cursor
    np.testing.assert_array_equal(block.response_tokens, tokens.response_tokens)
    np.testing.assert_array_equal(block.rollout_log_probs, tokens.rollout_log_probs)


async def test_a_used_up_budget_can_end_the_run(work: Bench) -> None:
    never = work.config.rollout.model_copy(
        update={"prompts_per_step": 4, "max_prompts_per_step": 4, "on_exhausted": "stop", "temperature": 1e-3}
    )
    work.config = work.config.model_copy(update={"rollout": never})
    async with work as rollouts:
        with pytest.raises(BudgetExhaustedError, match=r"the whole budget of 4 prompts gave \d of the 4 groups"):
            await rollouts.sample(1, 0, Progress())


async def test_a_cancelled_sampling_leaves_the_server_idle_and_usable(work: Bench) -> None:
    long = work.config.rollout.model_copy(update={"max_tokens": 150})
    work.config = work.config.model_copy(update={"rollout": long})
    async with work as rollouts:
        task = asyncio.create_task(rollouts.sample(1, 0, Progress()))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    work.config = work.config.model_copy(update={"rollout": long.model_copy(update={"max_tokens": 1})})
    async with work as rollouts:
        header, _ = await rollouts.sample(2, 0, Progress())
    assert header.cursor["drawn"] <= header.stats["drawn"]


async def test_evaluation_scores_the_held_out_problems(work: Bench) -> None:
    progress = Progress()
    async with work as rollouts:
        result = await rollouts.evaluate(progress)
    assert len(result["scores"]) == 6
    assert result["failed"] == 0
    assert result["answers"] == progress.answers == 18
    assert 0 <= result["accuracy"] <= 1


@pytest.fixture(scope="module")
def managed(
    tiny_model: Path, task: Path, tiny_fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteRollouts]:
    config = make_config(tiny_model, task, tiny_fleet, tmp_path_factory.mktemp("managed"))
    with open_rollouts(config, 0, lambda start: start()) as rollouts:
        assert isinstance(rollouts, RemoteRollouts)
        yield rollouts


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return direct + [descendant for child in direct for descendant in children(child)]


@pytest.mark.timeout(300)
def test_a_run_from_start_to_a_server_that_dies(managed: RemoteRollouts, tiny_model: Path) -> None:
    assert managed._process is not None
    controller = managed._process.process
    assert len(managed.wait_ready(quiet)) == 1
    managed.begin(1, version=0)
    header = managed.wait(1, quiet)
    assert not isinstance(header, UserError)
    assert header.stats["stale_tokens"] == 0
    block = managed.tokens(1, np.array([5], dtype=np.int32))
    expected = log_probs(load(tiny_model), block.prompt_tokens.tolist(), block.response_tokens.tolist())
    np.testing.assert_allclose(block.rollout_log_probs, expected, atol=1e-4)
    assert len(managed.evaluate("before", quiet)["scores"]) == 6

    processes = children(controller.pid)
    assert processes
    os.kill(processes[0], signal.SIGKILL)
    managed.begin(2, version=0)
    with pytest.raises(ControllerError, match="vLLM server 0 ended with code -9"):
        managed.wait(2, quiet)
    managed._process.stop()
    assert controller.poll() == 0
    time.sleep(0.2)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
