"""Worker processes: what they say and are told, how they die, and what the fleet is told of it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import worker as worker_module
from dapo_megatron.rollout.engine import LocalEngine
from dapo_megatron.rollout.requests import NOTHING, AnswerTask, Generated, RequestError, Sampling, Server
from dapo_megatron.rollout.worker import WorkerPool, open_engine, worker_count
from dapo_megatron.types import Prompt, Sample
from tests.processes import gone_within
from tests.unit.config_helpers import write_config, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVERS = [Server(name, f"http://10.0.0.{name}:1", "secret") for name in "0123"]
SO_FAR = Generated(
    np.array([5, 6], np.int32),
    np.array([-0.25, -1e-30], np.float32),
    np.array([1, 2], np.int32),
    "partial",
    np.arange(-4, 8, dtype=np.int16).reshape(3, 2, 2),
)


def task_of(name: str, does: str = "", so_far: Generated = NOTHING) -> AnswerTask:
    prompt = Prompt(3, (1, 2, 2**31 - 1), does, "sums")
    return AnswerTask(name, prompt, Sampling(9, 0.7, stop_token_ids=(4, 2)), so_far, by_rule=True, version=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("worker")
    write_model(folder / "model")
    return load_config(write_config(folder), [])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(config: Config) -> AsyncIterator[WorkerPool]:
    async with WorkerPool(config, 2, "tests.worker_engine:obedient") as pool:
        yield pool


async def ask(pool: WorkerPool, name: str, does: str = "", server: int = 0) -> Sample:
    return await pool.answer(SERVERS[server], task_of(name, does), lambda count: None)


async def state(pool: WorkerPool, server: int = 0) -> dict[str, int]:
    """Of the worker of a server."""
    versions = (await ask(pool, f"state-{server}", server=server)).versions[-4:].tolist()
    return dict(zip(("pid", "aborted", "cancelled", "steps"), versions, strict=True))


def assert_same(array: Any, expected: Any) -> None:
    np.testing.assert_array_equal(array, expected, strict=True)


async def test_a_task_goes_out_and_an_answer_comes_back_bit_for_bit(pool: WorkerPool) -> None:
    sample = await pool.answer(SERVERS[0], task_of("a", so_far=SO_FAR), lambda count: None)
    assert_same(sample.token_ids, np.array([1, 2, 2**31 - 1, 5, 6, len("secret")], np.int32))
    assert_same(sample.log_probs, np.array([-0.25, -1e-30, -0.3], np.float32))
    assert_same(sample.versions[:3], np.array([1, 2, 9], np.int32))
    assert_same(sample.routes, SO_FAR.routes)
    assert_same(sample.steps.places, np.array([1, 2], np.int32))
    assert_same(sample.steps.rewards, np.array([0.5, np.nan], np.float32))
    assert (sample.finish_reason, sample.correct, sample.reward) == ("length", True, -0.1)
    assert (sample.score, sample.reason) == (2 / 3, "sums")


async def test_a_failed_request_brings_what_there_is(pool: WorkerPool) -> None:
    with pytest.raises(RequestError, match=r"server http://10.0.0.1:1 failed") as caught:
        await pool.answer(SERVERS[1], task_of("b", "fail", SO_FAR), lambda count: None)
    assert caught.value.kind == "refused"
    assert caught.value.partial.finish_reason == "partial"
    assert_same(caught.value.partial.token_ids, np.array([5, 6, 6], np.int32))
    assert_same(caught.value.partial.routes, SO_FAR.routes)


async def test_servers_are_shared_out(pool: WorkerPool) -> None:
    pids = [(await state(pool, server))["pid"] for server in range(4)]
    assert pids[0] == pids[2] != pids[1] == pids[3]
    assert os.getpid() not in pids
    assert [os.getpgid(pid) == pid for pid in pids] == [True] * 4


async def test_tokens_are_told_of_in_between_and_an_abort_ends_a_request(pool: WorkerPool) -> None:
    arrived: list[int] = []
    answer = asyncio.create_task(pool.answer(SERVERS[1], task_of("c", "wait", SO_FAR), arrived.append))
    async with asyncio.timeout(20):
        while not arrived:
            await asyncio.sleep(0.02)
    before = await state(pool, 1)
    await pool.abort(SERVERS[1], ["c", "unknown"])
    with pytest.raises(RequestError, match="ended") as caught:
        await answer
    assert caught.value.kind == "aborted"
    assert len(caught.value.partial.token_ids) == 3
    assert arrived == [7]
    assert (await state(pool, 1))["aborted"] == before["aborted"] + 1


async def test_a_cancelled_answer_is_cancelled_in_the_worker(pool: WorkerPool) -> None:
    before = await state(pool)
    answer = asyncio.create_task(ask(pool, "d", "wait"))
    await asyncio.sleep(0.1)
    await state(pool)  # the worker has begun the answer by now
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert (await state(pool))["cancelled"] == before["cancelled"] + 1


async def test_the_end_of_a_step_is_told_to_all(pool: WorkerPool) -> None:
    before = [(await state(pool, server))["steps"] for server in (0, 1)]
    pool.end_step(5)
    await asyncio.sleep(0)
    assert [(await state(pool, server))["steps"] for server in (0, 1)] == [steps + 5 for steps in before]


async def test_a_fault_in_a_worker_is_no_fault_of_a_server(pool: WorkerPool) -> None:
    with pytest.raises(RuntimeError, match=r"worker 0 is broken.*by the test"):
        await ask(pool, "e", "break")
    assert (await state(pool))["pid"]


async def test_a_worker_that_dies_fails_its_answers_and_comes_back(pool: WorkerPool) -> None:
    first, other = (await state(pool, 0))["pid"], (await state(pool, 1))["pid"]
    waiting = asyncio.create_task(pool.answer(SERVERS[2], task_of("f", "wait", SO_FAR), lambda count: None))
    elsewhere = asyncio.create_task(ask(pool, "g", "wait", server=1))
    await asyncio.sleep(0.1)
    with pytest.raises(RequestError, match="worker 0 ended with code 7") as caught:
        await ask(pool, "h", "die")
    assert (caught.value.kind, len(caught.value.partial.token_ids)) == ("server", 0)
    with pytest.raises(RequestError, match="worker 0 ended with code 7") as caught:
        await waiting
    assert_same(caught.value.partial.token_ids, SO_FAR.token_ids)
    assert (await state(pool, 0))["pid"] == other  # the other one does its work meanwhile
    await pool.abort(SERVERS[1], ["g"])
    with pytest.raises(RequestError, match="ended"):
        await elsewhere
    async with asyncio.timeout(60):
        while (pid := (await state(pool, 0))["pid"]) == other:
            await asyncio.sleep(0.1)
    assert pid != first


async def test_a_worker_that_dies_too_often_ends_the_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_RESTARTS", 1)
    async with WorkerPool(config, 1, "tests.worker_engine:obedient") as pool:
        pid = (await state(pool))["pid"]
        os.kill(pid, signal.SIGKILL)
        await abort_while_none_runs(pool)
        pid = await anew(pool, pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="all rollout workers ended"):
            await anew(pool, pid)


async def test_a_worker_that_talks_nonsense_is_ended_and_no_answer_waits_for_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorkerPool(config, 1, "tests.worker_engine:obedient") as pool, asyncio.timeout(30):
        pid = (await state(pool))["pid"]
        monkeypatch.setattr(worker_module, "unpack_sample", lambda header, arrays: header["nonsense"])
        with pytest.raises(RequestError, match="worker 0 is given up"):
            await ask(pool, "k")
        with pytest.raises(RuntimeError, match="all rollout workers ended"):
            await ask(pool, "l")
        assert gone_within(pid, 5)


async def abort_while_none_runs(pool: WorkerPool) -> None:
    """A push that ends all answers does not wait for those that wait for a worker."""
    while pool._workers[0].running:
        await asyncio.sleep(0.01)
    answer = asyncio.create_task(pool.answer(SERVERS[0], task_of("i", "wait", SO_FAR), lambda count: None))
    other = asyncio.create_task(ask(pool, "j"))
    await asyncio.sleep(0)
    await pool.abort(SERVERS[0], ["i"])
    async with asyncio.timeout(20):
        with pytest.raises(RequestError, match="answer i was ended before a worker began it") as caught:
            await answer
        assert not pool._workers[0].running
        assert (caught.value.kind, caught.value.partial) == ("aborted", SO_FAR)
        assert len((await other).token_ids)


async def anew(pool: WorkerPool, before: int) -> int:
    """The process of the worker once it is another one."""
    while True:
        try:
            async with asyncio.timeout(60):
                if (pid := (await state(pool))["pid"]) != before:
                    return pid
        except RequestError:
            await asyncio.sleep(0.02)


async def test_workers_that_cannot_start_end_the_run(config: Config) -> None:
    with pytest.raises(RuntimeError, match="ended while it was started"):
        async with WorkerPool(config, 1, "tests.worker_engine:dies_at_once"):
            pass


async def test_what_the_user_got_wrong_is_said_as_such(config: Config, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import no_such_module_at_all\ndef reward(answer): ...")
    function = f"{tmp_path}/rewards.py:reward"
    broken = replace_data(config, reward_function=function)
    with pytest.raises(UserError, match=r"data.reward_function: .*no_such_module_at_all"):
        async with open_engine(replace_fleet(broken, workers=1)):
            pass


async def test_bad_rewards_are_counted_in_each_worker(
    config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer that is there already needs no server: it is graded, here by a function that fails."""
    (tmp_path / "rewards.py").write_text("def reward(answer): return 1 / 0")
    broken = replace_data(config, reward_function=f"{tmp_path}/rewards.py:reward")
    whole = replace(SO_FAR, finish_reason="stop")
    async with open_engine(replace_fleet(broken, workers=1)) as engine:
        tasks = [replace(task_of(f"{i}", so_far=whole), by_rule=i == 0) for i in range(13)]
        samples = await asyncio.gather(*(engine.answer(SERVERS[0], task, lambda count: None) for task in tasks))
        engine.end_step(5)
    assert [sample.reason == "bad_reward" for sample in samples] == [False] + [True] * 12
    log = capfd.readouterr().err
    assert log.count("worker 0: dapo_megatron.rollout.grader: bad reward of an answer to prompt 3") == 10
    assert "step 5: 12 bad rewards, of which 10 are shown" in log


async def test_a_small_fleet_needs_no_workers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [worker_count(None, servers) for servers in (1, 8, 9, 16, 17, 64)] == [0, 0, 2, 2, 3, 8]
    assert [worker_count(count, 64) for count in (0, 3)] == [0, 3]
    urls = [f"http://10.0.0.{i}:8000" for i in range(9)]
    for fleet, count in (({"servers": 8}, 0), ({"mode": "external", "urls": urls}, 2)):
        monkeypatch.setattr(worker_module, "WorkerPool", lambda config, count: contextlib.nullcontext(count))
        async with open_engine(replace_fleet(config, **fleet)) as engine:
            assert isinstance(engine, LocalEngine) if count == 0 else engine == count


def replace_data(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def replace_fleet(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"fleet": config.fleet.model_copy(update=changes)})
