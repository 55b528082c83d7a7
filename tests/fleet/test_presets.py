"""Every preset trains, end to end: real answers, rewards by a function of the user's, real Megatron, real pushes.

The runs share the server of these tests, so that each takes seconds: what a controller does, `SharedRollouts` does in
this process.
"""

import asyncio
import json
import math
import shutil
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file

from dapo_megatron import train as training_loop
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.preset import preset_names
from dapo_megatron.config.run import Config
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.monitoring.metrics import Record, read_metrics
from dapo_megatron.rollout.blocks import BatchTokens, select
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.handle import OnAdmission, OnProgress
from dapo_megatron.rollout.records import Records
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.rollout.work import RolloutWork, load_data
from dapo_megatron.rollout.worker_process import local_engine
from dapo_megatron.run_state.store import state_dir, state_path
from dapo_megatron.sync.server_admin import ServerAdmin
from dapo_megatron.trainer import parallel
from dapo_megatron.types import BatchHeader, Int32, TokenBlock
from tests.fleet.conftest import RunningServer

STEPS = 2
PROMPTS, SAMPLES = 4, 8
ANSWER_TOKENS = 10

# About half of all answers have either parity, whatever the prompt and the weights.
REWARD = """
def parity(answer):
    return 1.0 if sum(answer.token_ids) % 2 else -1.0
"""


class SharedRollouts:
    """`Rollouts` that a `RolloutWork` in this process samples from a server that is running."""

    def __init__(self, config: Config, running: RunningServer) -> None:
        self._config = config
        self._server = Server("0", running.url, running.token)
        self._batch: tuple[BatchHeader, BatchTokens] | None = None
        self._versions: dict[int, int] = {}
        self._pushed: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._loop = asyncio.Runner().__enter__()
        self._loop.run(self._open())
        return self

    async def _open(self) -> None:
        config = self._config
        self._engine = local_engine(config)
        records = Records(Path(config.run.dir) / "rollouts")
        self._fleet = Fleet(self._engine, config.fleet, records)
        self._fleet.add(self._server, None)
        tokenizer = Tokenizer(config.model.path)
        data = load_data(config, tokenizer, None)
        self._work = RolloutWork(config, data, tokenizer, self._fleet, self._engine, records)

    async def _close(self) -> None:
        await self._fleet.close()
        await self._engine.__aexit__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._close())
        self._loop.close()

    def wait_ready(self, on_progress: OnProgress) -> None:
        """It runs."""

    def begin(self, step: int, version: int, trained_version: int) -> None:
        self._versions[step] = version

    def wait(self, step: int, on_progress: OnProgress, on_admission: OnAdmission) -> BatchHeader:
        version = self._versions[step]
        self._batch = self._loop.run(self._work.sample(step, version, version, Progress()))
        return self._batch[0]

    def tokens(self, step: int, responses: Int32) -> TokenBlock:
        assert self._batch is not None
        return select(*self._batch, responses)

    def evaluate(self, name: str, on_progress: OnProgress, on_admission: OnAdmission) -> None:
        """No preset has held-out prompts."""

    def begin_push(self, push: int, version: int) -> None:
        self._pushed[push] = version

    def servers_for_push(self, push: int, attempt: int) -> Sequence[Server]:
        return [self._server]

    def push_failed(self, push: int, attempt: int, id: str, reason: str) -> None:
        raise AssertionError(reason)

    def push_done(self, push: int, attempt: int, seconds: float) -> None:
        async def release() -> None:
            self._fleet.release(self._pushed[push], ["0"])

        self._loop.run(release())

    def admitted(self, number: int, version: int, ids: Sequence[str], failed: Mapping[str, str]) -> None:
        raise AssertionError("nobody joins")


@pytest.fixture(scope="module")
def sections(
    tiny_model: Path, task: Path, tiny_fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Makes the sections of a run with a preset in a folder."""
    folder = tmp_path_factory.mktemp("presets")
    reward, pairs = folder / "reward.py", folder / "pairs.jsonl"
    reward.write_text(REWARD)
    rows = [{"prompt": f"{n} + {n} = ", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(20)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(preset: str, run_dir: Path, steps: int = STEPS) -> dict[str, Any]:
        offline = preset == "dpo"
        samples = 2 if offline else SAMPLES
        train = {"train": {"path": str(pairs if offline else task)}}
        reward_function = {} if offline else {"reward_function": f"{reward}:parity"}
        one_update = preset in ("dpo", "dapo_with_kl", "r1_zero")  # those of DPO; the KL of later ones is not 0
        return {
            "run": {"dir": str(run_dir), "steps": steps},
            "model": {"path": str(tiny_model)},
            "data": {"max_prompt_tokens": 56} | train | reward_function,
            "rollout": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": samples,
                "max_tokens": ANSWER_TOKENS,
                "stop": list(string.ascii_lowercase),  # some answers end by themselves, others are cut off
            },
            "algorithm": preset,
            "training": {
                "mini_batch": PROMPTS * samples // (1 if one_update else 2),
                "micro_batch_tokens": 512,
                "precision": "fp32",
                "threads": 1,
            },
            "optimizer": {"lr": 1e-3, "warmup_steps": 0},
            "critic": {"optimizer": {"lr": 1e-3, "warmup_steps": 0}},
            "fleet": tiny_fleet.model_dump(),
            "tracking": {"console": "plain"},
        }

    return make


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_trains(
    preset: str,
    sections: Callable[..., dict[str, Any]],
    restored: RunningServer,
    layout: parallel.Layout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config.model_validate(sections(preset, tmp_path))
    if preset != "dpo":  # which has no servers
        monkeypatch.setattr(training_loop, "open_rollouts", lambda config, *_: SharedRollouts(config, restored))
    training_loop.train(config, layout)
    records = list(read_metrics(tmp_path))
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        check_step(record, config)
    check_kl(records, config)
    if preset == "dpo":
        check_preferences(records)
    else:
        assert weight_version(restored) == STEPS
    assert changed(tmp_path / "hf", restored.model)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["groups_kept"] == sum(record["kept"] for record in records)
    assert summary["updates"] == STEPS * config.responses_per_step // config.training.mini_batch


def test_a_resumed_run_with_a_critic_ends_with_the_same_weights(
    sections: Callable[..., dict[str, Any]],
    restored: RunningServer,
    layout: parallel.Layout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the state of step 2, its last batch once more."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = sections("ppo", whole, steps=3)
    run["run"]["save_every"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "open_rollouts", lambda config, *_: SharedRollouts(config, restored))
        training_loop.train(Config.model_validate(run), layout)
    saved = state_path(parts, 2)
    shutil.copytree(state_path(whole, 2), saved)
    (state_dir(parts) / "latest").write_text(saved.name)
    run["run"]["dir"], run["rollout"]["replay"] = str(parts), str(whole / "rollouts")
    training_loop.train(Config.model_validate(run), layout)
    (last,) = read_metrics(parts)
    expected = list(read_metrics(whole))[-1]
    assert last["step"] == expected["step"] == 3
    for key in ("grad_norm", "loss", "critic/grad_norm", "critic/loss", "critic/explained_variance", "value"):
        assert last[key] == expected[key], key
    ours, theirs = ((folder / "hf" / "model.safetensors").read_bytes() for folder in (parts, whole))
    assert ours == theirs


def check_step(record: Record, config: Config) -> None:
    """A whole batch, a gradient in each update, and numbers everywhere but where there is nothing to measure."""
    assert record["kept"] == PROMPTS
    assert record["skipped"] == record["skipped_updates"] == 0
    assert record["updates"] == config.responses_per_step / config.training.mini_batch
    assert record["grad_norm"] > 0
    assert record["first_log_ratio"] == 0
    unknown = {key for key, value in record.items() if not isinstance(value, str) and not is_number(value)}
    expected = {"clip_high_probability"}
    if config.algorithm.loss == "dpo":  # no engine has seen the answers
        expected |= {"rollout_diff", "rollout_diff_max", "rollout_weight"}
    assert unknown <= expected
    if config.algorithm.loss != "dpo":
        assert record["rollout_diff_max"] < 1e-3
        assert record["off_policy_tokens"] == 0
    if config.algorithm.overlong.filter:  # of some answers, not of all
        assert 0 < record["truncated"] < 1
    if config.rollout.dynamic_sampling:
        assert record["drawn"] == sum(record[key] for key in ("kept", "all_right", "all_wrong", "failed", "requeued"))
    if config.algorithm.has_critic:
        assert record["critic/grad_norm"] > 0
        assert {"critic/loss", "critic/value", "critic/explained_variance", "value", "return"} <= record.keys()
    else:
        assert not any(key.startswith("critic/") for key in record)


def check_kl(records: Sequence[Record], config: Config) -> None:
    """The reference is the policy at the start, to the bit; nothing is measured without one."""
    first, second = (record["kl"] for record in records)
    assert first == 0
    assert second > 0 if config.algorithm.has_reference else second == 0


def check_preferences(records: Sequence[Record]) -> None:
    """At the start there is no preference: log 2. What was learned of some pairs holds for others of their kind."""
    first, second = records
    assert first["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["preference_margin"] == pytest.approx(0, abs=1e-6)
    assert second["preference_loss"] > 0
    assert second["preference_margin"] != 0


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def changed(folder: Path, model: Path) -> bool:
    """Whether every matrix of an exported model differs from what the run started with."""
    ours, before = (load_file(path / "model.safetensors") for path in (folder, model))
    assert ours.keys() == before.keys()
    return all(not torch.equal(ours[name], before[name]) for name in before if ours[name].ndim > 1)


def weight_version(running: RunningServer) -> int:
    admin = ServerAdmin(running.url, running.token, timeout=30)
    try:
        return admin.weight_version()
    finally:
        admin.close()
