"""Rollouts with real servers: batches, evaluations, recordings, and how everything ends."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, Replay, StopRun, open_rollouts
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.service import BudgetExhaustedError
from dapo_megatron.rollout.work import RolloutWork, load_data
from tests.fleet.conftest import MAX_MODEL_LEN, RunningServer
from tests.fleet.tiny import load, log_probs
from tests.processes import descendants, gone_within

MAX_TOKENS = 200


def quiet(done: float, total: float, text: str) -> None:
    pass


def make_config(model: Path, task: Path, fleet: FleetConfig, run_dir: Path, **rollout: object) -> Config:
    """Answers of one token, unless `rollout` says otherwise."""
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


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(running: RunningServer, task: Path, tiny_fleet: FleetConfig, tmp_path: Path) -> MakeBench:
    """Makes benches; keyword arguments go into the `rollout` section."""
    return lambda **rollout: Bench(make_config(running.model, task, tiny_fleet, tmp_path / "run", **rollout), running)


async def version_of(work: RolloutWork) -> int:
    """The weight version now in the shared server, which other tests change."""
    header, _ = await work.sample(0, 0, Progress())
    return int(header.versions[0, 0])


async def test_a_batch_holds_mixed_groups_with_the_log_probs_of_the_model(bench: MakeBench) -> None:
    async with bench() as rollouts:
        version = await version_of(rollouts)
        header, tokens = await rollouts.sample(1, version, Progress())
    assert len(header.draws) == 4
    right = np.bincount(header.groups, weights=header.correct)
    assert ((right > 0) & (right < 8)).all()
    assert header.stats["stale_tokens"] == 0
    assert header.stats["drawn"] == sum(
        header.stats[k] for k in ("kept", "all_right", "all_wrong", "failed", "requeued")
    )
    assert (header.versions == version).all()
    assert np.isfinite(tokens.rollout_log_probs).all()
    assert (tokens.rollout_log_probs <= 0).all()
    np.testing.assert_array_equal(header.rewards, np.where(header.correct, 1, -1))


async def test_tokens_of_another_version_are_counted(bench: MakeBench) -> None:
    async with bench() as rollouts:
        version = await version_of(rollouts)
        header, _ = await rollouts.sample(1, version + 1, Progress())
    assert header.stats["stale_tokens"] == header.response_lengths.sum()


async def test_each_batch_is_recorded(bench: MakeBench) -> None:
    recorder = bench()
    async with recorder as rollouts:
        header, tokens = await rollouts.sample(1, 0, Progress())
    with Replay(Path(recorder.config.run.dir) / "rollouts") as replay:
        recorded = replay.wait(1, quiet)
        block = replay.tokens(1, np.arange(header.num_responses, dtype=np.int32))
    np.testing.assert_array_equal(recorded.rewards, header.rewards)
    assert recorded.cursor == header.cursor
    np.testing.assert_array_equal(block.response_tokens, tokens.response_tokens)
    np.testing.assert_array_equal(block.rollout_log_probs, tokens.rollout_log_probs)


async def test_a_used_up_budget_can_end_the_run(bench: MakeBench) -> None:
    async with bench(max_prompts_per_step=4, on_exhausted="stop", temperature=1e-3) as rollouts:
        with pytest.raises(BudgetExhaustedError, match=r"the whole budget of 4 prompts gave \d of the 4 groups"):
            await rollouts.sample(1, 0, Progress())


async def test_a_cancelled_sampling_leaves_the_server_idle(bench: MakeBench, running: RunningServer) -> None:
    async with bench(max_tokens=MAX_TOKENS) as rollouts:
        progress = Progress()
        task = asyncio.create_task(rollouts.sample(1, 0, progress))
        await asyncio.sleep(0.5)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with bench() as rollouts:
        await rollouts.sample(2, 0, Progress())  # the server's figures are those of its last step
    reply = httpx.get(f"{running.url}/metrics", headers={"Authorization": f"Bearer {running.token}"})
    counts = re.findall(r"(?m)^vllm:num_requests_(?:running|waiting)\{.*\} (.*)$", reply.raise_for_status().text)
    assert len(counts) >= 2
    assert set(map(float, counts)) == {0.0}


async def test_evaluation_scores_the_held_out_problems(bench: MakeBench) -> None:
    progress = Progress()
    async with bench() as rollouts:
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


@pytest.mark.timeout(300)
def test_a_run_from_start_to_a_server_that_dies(managed: RemoteRollouts, tiny_model: Path) -> None:
    assert managed._process is not None
    controller = managed._process.process
    assert len(managed.wait_ready(quiet)) == 1
    managed.begin(1, version=0)
    header = managed.wait(1, quiet)
    assert not isinstance(header, StopRun)
    assert header.stats["stale_tokens"] == 0
    block = managed.tokens(1, np.array([5], dtype=np.int32))
    expected = log_probs(load(tiny_model), block.prompt_tokens.tolist(), block.response_tokens.tolist())
    np.testing.assert_allclose(block.rollout_log_probs, expected, atol=1e-4)
    assert len(managed.evaluate("before", quiet)["scores"]) == 6

    processes = descendants(controller.pid)
    assert processes
    os.kill(processes[0], signal.SIGKILL)
    managed.begin(2, version=0)
    with pytest.raises(ControllerError, match="vLLM server 0 ended with code -9"):
        managed.wait(2, quiet)
    managed._process.stop()
    assert controller.poll() == 0
    assert all(gone_within(pid, 5) for pid in processes)
