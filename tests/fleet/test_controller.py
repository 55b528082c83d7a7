"""Rollouts with real servers: batches, evaluations, recordings, and how everything ends."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from torch import Tensor

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.handle import ControllerError, RemoteRollouts, Replay, StopRun, open_rollouts
from dapo_megatron.rollout.jobs import Admission, BudgetExhaustedError
from dapo_megatron.rollout.members import VersionError
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.work import RolloutWork, load_data
from dapo_megatron.rollout.worker import open_engine
from dapo_megatron.sync.plan import TransferPlan
from dapo_megatron.sync.server_admin import ServerError
from tests.fleet.conftest import MAX_MODEL_LEN, RunningServer
from tests.fleet.tiny import load, log_probs, weights
from tests.processes import descendants, gone_within
from tests.pushing import Push, TensorSource, plan_of

MAX_TOKENS = 200


def quiet(done: float, total: float, text: str) -> None:
    pass


def nobody(admission: Admission) -> None:
    raise AssertionError(f"{admission} was not expected")


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
    """`RolloutWork` on the shared server, in this process. `version` is that of its weights, which other tests change.

    The fleet believes it to be `lie` versions newer.
    """

    def __init__(self, config: Config, running: RunningServer, lie: int) -> None:
        self.config, self.running, self.lie = config, running, lie
        self.version = 0
        self._parts = AsyncExitStack()

    async def __aenter__(self) -> RolloutWork:
        tokenizer = Tokenizer(self.config.model.path)
        async with ServerClient(self.running.url, self.running.token, timeout=60) as client:
            self.version = (await client.facts()).weights
        engine = await self._parts.enter_async_context(open_engine(self.config))
        records = Records(Path(self.config.run.dir) / "rollouts")
        self._parts.callback(records.close)
        fleet = Fleet(engine, self.config.fleet, records)
        self._parts.push_async_callback(fleet.close)
        fleet.add(Server("shared", self.running.url, self.running.token), self.version + self.lie)
        return RolloutWork(self.config, load_data(self.config, tokenizer, None), tokenizer, fleet, engine, records)

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(running: RunningServer, task: Path, tiny_fleet: FleetConfig, tmp_path: Path) -> MakeBench:
    """Makes benches; keyword arguments go into the `rollout` section."""

    def make(lie: int = 0, **rollout: object) -> Bench:
        return Bench(make_config(running.model, task, tiny_fleet, tmp_path / "run", **rollout), running, lie)

    return make


async def test_a_batch_holds_mixed_groups_with_the_log_probs_of_the_model(bench: MakeBench) -> None:
    made = bench()
    async with made as rollouts:
        version = made.version
        header, tokens = await rollouts.sample(1, version, version, Progress())
    assert len(header.draws) == 4
    right = np.bincount(header.groups, weights=header.correct)
    assert ((right > 0) & (right < 8)).all()
    assert header.stats["drawn"] == sum(
        header.stats[k] for k in ("kept", "all_right", "all_wrong", "failed", "requeued")
    )
    assert (header.versions == version).all()
    assert np.isfinite(tokens.rollout_log_probs).all()
    assert (tokens.rollout_log_probs <= 0).all()
    np.testing.assert_array_equal(header.rewards, np.where(header.correct, 1, -1))


async def test_answers_of_other_weights_than_the_server_should_have_end_the_run(bench: MakeBench) -> None:
    made = bench(lie=1)
    async with made as rollouts:
        with pytest.raises(VersionError, match=rf"server shared \(http\S+\) .* with weights {made.version}, but"):
            await rollouts.sample(1, made.version + 1, made.version + 1, Progress())


async def test_each_batch_is_recorded(bench: MakeBench) -> None:
    recorder = bench()
    async with recorder as rollouts:
        header, tokens = await rollouts.sample(1, 0, 0, Progress())
    with Replay(Path(recorder.config.run.dir) / "rollouts") as replay:
        recorded = replay.wait(1, quiet, nobody)
        block = replay.tokens(1, np.arange(header.num_responses, dtype=np.int32))
    np.testing.assert_array_equal(recorded.rewards, header.rewards)
    assert recorded.cursor == header.cursor
    np.testing.assert_array_equal(block.response_tokens, tokens.response_tokens)
    np.testing.assert_array_equal(block.rollout_log_probs, tokens.rollout_log_probs)


async def test_a_used_up_budget_can_end_the_run(bench: MakeBench) -> None:
    async with bench(max_prompts_per_step=4, on_exhausted="stop", temperature=1e-3) as rollouts:
        with pytest.raises(BudgetExhaustedError, match=r"the whole budget of 4 prompts gave \d of the 4 groups"):
            await rollouts.sample(1, 0, 0, Progress())


async def test_a_cancelled_sampling_leaves_the_server_idle(bench: MakeBench, running: RunningServer) -> None:
    async with bench(max_tokens=MAX_TOKENS) as rollouts:
        progress = Progress()
        task = asyncio.create_task(rollouts.sample(1, 0, 0, progress))
        await asyncio.sleep(0.5)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with bench() as rollouts:
        await rollouts.sample(2, 0, 0, Progress())  # the server's figures are those of its last step
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
    fleet = tiny_fleet.model_copy(update={"max_restarts": 0})
    config = make_config(tiny_model, task, fleet, tmp_path_factory.mktemp("managed"))
    with open_rollouts(config, 0, lambda start: start()) as rollouts:
        assert isinstance(rollouts, RemoteRollouts)
        yield rollouts


class Lethal(TensorSource):
    """The weights of a model, and the death of `victims` when those in the middle of the push are asked for."""

    def __init__(self, model: Path, plan: TransferPlan, victims: Sequence[int]) -> None:
        super().__init__(weights(load(model)))
        self._row, self._victims = plan.turns[len(plan.turns) // 2].rows[0], victims
        self.killed_at = 0.0

    def gather(self, row: Parameter) -> list[Tensor]:
        if row is self._row:
            self.killed_at = time.monotonic()
            for pid in self._victims:
                os.kill(pid, signal.SIGKILL)
        return super().gather(row)


@pytest.mark.timeout(300)
def test_a_run_from_start_to_a_server_that_dies_during_a_push(managed: RemoteRollouts, tiny_model: Path) -> None:
    """Who pushes is told at once which server it was, and the run ends for want of servers."""
    assert managed._process is not None
    controller = managed._process.process
    managed.wait_ready(quiet)
    managed.begin_push(0, version=0)
    (server,) = managed.servers_for_push(0, 0)
    assert server.id == "server_0"
    managed.push_done(0, 0, 0.0)  # it has the weights of version 0 from the model's folder
    managed.begin(1, 0, 0)
    header = managed.wait(1, quiet, nobody)
    assert not isinstance(header, StopRun)
    assert (header.versions == 0).all()
    block = managed.tokens(1, np.array([5], dtype=np.int32))
    expected = log_probs(load(tiny_model), block.prompt_tokens.tolist(), block.response_tokens.tolist())
    np.testing.assert_allclose(block.rollout_log_probs, expected, atol=1e-4)
    assert len(managed.evaluate("before", quiet, nobody)["scores"]) == 6

    processes = descendants(controller.pid)
    assert processes
    plan = plan_of(tiny_model)
    lethal, push = Lethal(tiny_model, plan, processes), Push(plan, [(server.url, server.token)], timeout=60)
    try:
        push.connect()
        push.pusher._sender._source = lethal
        with pytest.raises(ServerError, match=f"server {server.url}: POST /update_weights failed") as caught:
            push.pusher.push(1)
        assert caught.value.url == server.url
        assert time.monotonic() - lethal.killed_at < 10
    finally:
        push.close()
    managed.begin(2, 0, 0)
    with pytest.raises(ControllerError, match=r"(?s)no vLLM server is left.*vLLM server_0: it ended with code -9"):
        managed.wait(2, quiet, nobody)
    managed._process.stop()
    assert controller.poll() == 0
    assert all(gone_within(pid, 5) for pid in processes)
