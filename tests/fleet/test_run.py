"""Whole runs of `dapo-megatron train`: real servers, real Megatron, and what must hold of what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import yaml

from dapo_megatron.checkpoint.compare import differences
from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.run import Config
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.monitoring.metrics import read_metrics
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.run_state.store import latest_state
from tests.distributed.launch import Launcher
from tests.fleet.conftest import START_SECONDS, write_task
from tests.fleet.tiny import load, log_probs, write_tiny_model
from tests.models import REPOSITORY
from tests.processes import descendants, gone_within

if TYPE_CHECKING:
    from dapo_megatron.trainer.parallel import Layout

STEPS = 4
RUN_SECONDS = 300

pytestmark = pytest.mark.timeout(RUN_SECONDS + 60)


def sections(model: Path, task: Path, fleet: FleetConfig, run_dir: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(run_dir), "steps": STEPS, "save_every": 2},
        "model": {"path": str(model)},
        "data": {"train": {"path": str(task)}, "max_prompt_tokens": 56, "reward": "exact"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_tokens": 1, "max_rounds": 20},
        "training": {"mini_batch": 16, "micro_batch_tokens": 512, "precision": "fp32", "threads": 1},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "fleet": fleet.model_dump(),
        "evaluation": {"data": {"path": str(task)}, "samples": 4},
        "tracking": {"console": "plain"},
    }


@contextmanager
def started(config: Path, *overrides: str, ranks: int = 1) -> Iterator["subprocess.Popen[str]"]:
    """The command, in a session of its own; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "dapo_megatron.cli", "train", str(config), *overrides, "--nproc", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def train(config: Path, *overrides: str, ranks: int = 1) -> str:
    """Run to the end; the output."""
    with started(config, *overrides, ranks=ranks) as process:
        output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def config_path(
    tiny_model: Path, task: Path, tiny_fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections(tiny_model, task, tiny_fleet, folder / "recorded")))
    return path


@pytest.fixture(scope="module")
def recorded(config_path: Path) -> Path:
    """The folder of a run with servers, which the other tests replay."""
    print(train(config_path))
    return config_path.parent / "recorded"


def weights(run_dir: Path) -> bytes:
    return (run_dir / "hf" / "model.safetensors").read_bytes()


def test_every_batch_is_mixed_on_policy_and_accounted_for(recorded: Path) -> None:
    """Laws 5, 6 and 7, and the weight version of every token."""
    steps = [record for record in read_metrics(recorded) if "evaluation" not in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    next_draw = 0
    for record in steps:
        header, tokens = Journal(recorded / "rollouts").read(record["step"])
        assert (header.versions == record["step"] - 1).all()  # sampled with the weights of the step before
        right = np.bincount(header.groups, weights=header.correct)
        assert ((right > 0) & (right < 8)).all()
        assert list(header.draws) == sorted(header.draws)
        assert header.draws[0] >= next_draw
        next_draw = header.draws[-1] + 1
        assert len(tokens.response_tokens) == len(tokens.rollout_log_probs) == header.response_lengths.sum()
        assert record["first_log_ratio"] == 0.0
        assert record["rollout_diff_max"] < 1e-3
        dropped = record["all_right"] + record["all_wrong"] + record["failed"]
        assert record["drawn"] == record["kept"] + dropped + record["requeued"]


def test_summary_tells_what_was_reached(recorded: Path) -> None:
    summary = json.loads((recorded / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["groups_kept"] == 4 * STEPS
    assert summary["accuracy_after"] > summary["accuracy_before"]
    assert summary["peak_memory_gb"] > 0.5


def test_exported_model_is_the_policy(recorded: Path, config_path: Path, layout: "Layout") -> None:
    """transformers alone computes the trained policy's log-probs."""
    from dapo_megatron.rollout.blocks import select
    from dapo_megatron.run_state.checkpoint import RunState
    from dapo_megatron.trainer.batching import build_batch, plan_batch
    from dapo_megatron.trainer.policy import Policy

    config = Config.model_validate(yaml.safe_load(config_path.read_text()))
    policy = Policy(config, layout)
    assert RunState(config, policy).restore()
    header, tokens = Journal(recorded / "rollouts").read(STEPS)
    block = select(header, tokens, np.arange(header.num_responses, dtype=np.int32))
    rules = policy.packing
    plans = plan_batch(header, rules)
    batch = build_batch(header, plans, block, rules, data_rank=0, context_rank=0, device=torch.device("cpu"))
    model = load(recorded / "hf")
    prompts = np.split(block.prompt_tokens, np.cumsum(block.prompt_lengths)[:-1])
    for micro, ours in zip(batch.micro_batches(), policy.log_probs(batch), strict=True):
        for i, r in enumerate(micro.responses.tolist()):  # one token each
            theirs = log_probs(model, prompts[r].tolist(), [int(block.response_tokens[r])])
            torch.testing.assert_close(ours[i : i + 1], theirs, atol=1e-4, rtol=0)


def replay(config_path: Path, recorded: Path, run_dir: Path, *overrides: str) -> None:
    """The recorded run once more, in this process."""
    from dapo_megatron.config.load import load_config
    from dapo_megatron.train import train
    from dapo_megatron.trainer import parallel

    config = load_config(
        str(config_path), [f"rollout.replay={recorded / 'rollouts'}", f"run.dir={run_dir}", *overrides]
    )
    train(config, parallel.initialize(config.parallel, config.run.seed, config.training.threads))


@pytest.mark.usefixtures("layout")
def test_replay_reproduces_the_weights(recorded: Path, config_path: Path, tmp_path: Path) -> None:
    replay(config_path, recorded, tmp_path)
    assert weights(tmp_path) == weights(recorded)


@pytest.mark.usefixtures("layout")
def test_resumed_run_ends_with_the_same_weights(recorded: Path, config_path: Path, tmp_path: Path) -> None:
    """Stopped after step 3 by its own end, then continued."""
    replay(config_path, recorded, tmp_path, "run.steps=3")
    assert weights(tmp_path) != weights(recorded)
    replay(config_path, recorded, tmp_path)
    assert weights(tmp_path) == weights(recorded)
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, STEPS + 1))


@pytest.mark.usefixtures("layout")
def test_killed_run_ends_with_the_same_weights(recorded: Path, config_path: Path, tmp_path: Path) -> None:
    """Killed outright once a state is saved; the launcher's death takes the ranks with it."""
    overrides = [f"rollout.replay={recorded / 'rollouts'}", f"run.dir={tmp_path}"]
    with started(config_path, *overrides, "run.save_every=1") as process:
        deadline = time.monotonic() + RUN_SECONDS
        while latest_state(tmp_path) is None:
            assert process.poll() is None or latest_state(tmp_path), process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks = descendants(process.pid)
        process.kill()
        assert all(gone_within(pid, 45) for pid in ranks)
    replay(config_path, recorded, tmp_path, "run.save_every=1")
    assert weights(tmp_path) == weights(recorded)


SPLIT = {
    "tensor": ["parallel.tensor=2", "parallel.sequence=true", "algorithm=ppo"],  # with a critic
    "context": ["parallel.context=2", "algorithm.loss=gspo", "algorithm.aggregation=sequence_mean"],
    "pipeline": ["parallel.pipeline=2"],
}


@pytest.fixture(scope="module")
def on_two_ranks(
    run_ranks: Launcher,
    recorded: Path,
    config_path: Path,
    borrowed: list[str],
    tiny_fleet: FleetConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of runs that the same two ranks did one after another: to start ranks takes longer than any of them.

    Those of SPLIT have the shared server. `experts` starts its own, from a Megatron checkpoint of another layout.
    """
    folder = tmp_path_factory.mktemp("two_ranks")
    model = write_tiny_model(folder / "model", experts=True)
    hf_to_megatron(model, folder / "converted", ParallelConfig(tensor=2))
    experts = folder / "experts.yaml"
    values = sections(folder / "converted", write_task(model, folder), tiny_fleet, folder / "experts")
    experts.write_text(yaml.safe_dump(values))
    bf16 = [f"rollout.replay={recorded / 'rollouts'}", "training.precision=bf16", "parallel.tensor=2"]
    live = ["run.steps=2", "evaluation.data=null"]
    jobs = [
        [config_path, f"run.dir={folder / 'parts'}", *bf16, "run.steps=2"],
        [config_path, f"run.dir={folder / 'whole'}", *bf16],
        [config_path, f"run.dir={folder / 'parts'}", *bf16],
        *([config_path, f"run.dir={folder / name}", *live, *borrowed, *layout] for name, layout in SPLIT.items()),
        [experts, *live, "parallel.expert=2"],
    ]
    words = [[str(word) for word in job] for job in jobs]
    run_ranks(2, "tests.fleet.train_worker", {"jobs": words}, folder, RUN_SECONDS)
    return folder


two_ranks = pytest.mark.timeout(START_SECONDS + 2 * RUN_SECONDS + 60)  # the first waits for all that it needs


@two_ranks
def test_resume_in_bf16_over_tensor_parallel_ranks(on_two_ranks: Path) -> None:
    """Stopped after step 2, with another run in between."""
    assert [record["step"] for record in read_metrics(on_two_ranks / "parts")] == list(range(1, STEPS + 1))
    assert weights(on_two_ranks / "parts") == weights(on_two_ranks / "whole")


@two_ranks
@pytest.mark.parametrize("name", SPLIT)
def test_weights_of_a_split_model_reach_the_servers(on_two_ranks: Path, tiny_model: Path, name: str) -> None:
    """The proof at the start of every run (law 3) and the log-probs of every answer hold with two ranks."""
    check_answers(on_two_ranks / name)
    check_state(on_two_ranks / name, tiny_model)


@two_ranks
def test_experts_spread_over_ranks_reach_the_servers(on_two_ranks: Path) -> None:
    """From a checkpoint converted for two tensor-parallel ranks; the servers, too, get all weights pushed."""
    check_answers(on_two_ranks / "experts")
    check_state(on_two_ranks / "experts", on_two_ranks / "model")


def check_answers(run_dir: Path) -> None:
    """The servers' log-probs of every answer are the trainer's."""
    records = list(read_metrics(run_dir))
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["first_log_ratio"] == 0.0
        assert record["rollout_diff_max"] < 1e-3


def check_state(run_dir: Path, model: Path) -> None:
    """The saved state is the exported model, and not what it was at the start."""
    state = latest_state(run_dir)
    assert state is not None
    megatron_to_hf(state, run_dir / "converted")
    assert list(differences(run_dir / "converted", run_dir / "hf")) == []
    assert list(differences(run_dir / "converted", model)) != []


@pytest.mark.parametrize("moment", ["servers start", "training"])
def test_ctrl_c_ends_everything(config_path: Path, tmp_path: Path, moment: str) -> None:
    """Exit code 130, and no process is left: neither ranks, nor controller, nor servers."""
    with started(config_path, f"run.dir={tmp_path}", "run.steps=100000", "evaluation.data=null") as process:
        wanted = tmp_path / ("logs/server_0.log" if moment == "servers start" else "rollouts/step_000002.npz")
        deadline = time.monotonic() + RUN_SECONDS
        while not wanted.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        everyone = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 130, output[-3000:]
        assert "Traceback" not in output
        assert all(gone_within(pid, 15) for pid in everyone)
