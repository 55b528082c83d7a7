"""Saved states on disk, and a run that continues from one as if it had never stopped."""

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.files import write_atomically
from dapo_megatron.run_state.checkpoint import RunState, _sharded, load_latest
from dapo_megatron.run_state.store import (
    FULLY_RESHARDABLE,
    MANIFEST,
    RUN,
    latest_state,
    publish,
    read_run,
    state_dir,
    state_path,
    verify,
)
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config
from tests.training import differing, tensors, train


def publish_step(run_dir: Path, step: int, keep: int = 10) -> Path:
    """A state of two files."""
    state = state_path(run_dir, step)
    incomplete = state.with_name(state.name + ".incomplete")
    (incomplete / "inner").mkdir(parents=True)
    (incomplete / "weights").write_bytes(bytes(1000))
    (incomplete / "inner" / "more").write_text(str(step))
    publish(incomplete, state, {"step": step}, keep)
    return state


def steps_kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in state_dir(run_dir).iterdir())


def test_published_state_is_the_latest(tmp_path: Path) -> None:
    assert latest_state(tmp_path) is None
    for step in (1, 2):
        state = publish_step(tmp_path, step)
        assert latest_state(tmp_path) == state
        assert read_run(state, "step") == {"step": step, "optimizer": "dp_reshardable"}
        verify(state)
    assert steps_kept(tmp_path) == ["latest", "step_000001", "step_000002"]


def test_older_states_are_deleted(tmp_path: Path) -> None:
    for step in (2, 4, 6, 1_000):
        publish_step(tmp_path, step, keep=2)
    assert steps_kept(tmp_path) == ["latest", "step_000006", "step_001000"]


def test_going_back_to_an_older_state_never_deletes_the_new_one(tmp_path: Path) -> None:
    for step in (3, 6):
        publish_step(tmp_path, step)
    (state_dir(tmp_path) / "latest").write_text("step_000003\n")
    state = publish_step(tmp_path, 4, keep=1)
    assert latest_state(tmp_path) == state
    verify(state)
    assert steps_kept(tmp_path) == ["latest", "step_000004", "step_000006"]


def test_state_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    state = publish_step(tmp_path, 1)
    (state / "stale").write_text("")
    publish_step(tmp_path, 1)
    verify(state)
    assert not (state / "stale").exists()


@pytest.mark.parametrize("name", ["weights", "inner/more", "run.json"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    state = publish_step(tmp_path, 1)
    (state / name).unlink()
    with pytest.raises(UserError, match=f"damaged: {name} is missing"):
        verify(state)


@pytest.mark.parametrize("content", [bytes(999), bytes(999) + b"\1", bytes(1001)])
def test_changed_file_is_named(tmp_path: Path, content: bytes) -> None:
    state = publish_step(tmp_path, 1)
    (state / "weights").write_bytes(content)
    with pytest.raises(UserError, match="damaged: weights differs from its checksum"):
        verify(state)


@pytest.mark.parametrize(("name", "read"), [("run.json", read_run), ("manifest.json", verify)])
def test_half_written_json_is_named(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    state = publish_step(tmp_path, 1)
    (state / name).write_text('{"step"')
    with pytest.raises(UserError, match=f"damaged: {name} cannot be read"):
        read(state)


def test_missing_key_is_named(tmp_path: Path) -> None:
    state = publish_step(tmp_path, 1)
    with pytest.raises(UserError, match=r"damaged: run.json has no 'layout'"):
        read_run(state, "step", "layout")


@pytest.mark.parametrize("pointer", ["step_000009", ""])
def test_latest_that_names_nothing(tmp_path: Path, pointer: str) -> None:
    publish_step(tmp_path, 1)
    (state_dir(tmp_path) / "latest").write_text(pointer)
    with pytest.raises(UserError, match="missing or incomplete"):
        latest_state(tmp_path)


def test_save_that_did_not_finish_is_ignored(tmp_path: Path) -> None:
    state = publish_step(tmp_path, 1)
    (state_dir(tmp_path) / "step_000002.incomplete").mkdir()
    assert latest_state(tmp_path) == state


def test_atomic_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"longer than", b"the next"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


Make = Callable[..., Config]


@pytest.fixture
def config(checkpoint: Callable[..., Path], tmp_path: Path) -> Make:
    """A config whose run lies in the test's folder; arguments are sections."""

    def make(family: str = "qwen2", **sections: dict[str, Any]) -> Config:
        run = {"dir": str(tmp_path), "save_every": 2} | sections.pop("run", {})
        optimizer = {"lr": 1e-3, "warmup_steps": 10} | sections.pop("optimizer", {})
        return make_config(checkpoint(family), run=run, optimizer=optimizer, **sections)

    return make


@pytest.mark.parametrize(("precision", "reshardable"), [("fp32", "last"), ("bf16", "last"), ("bf16", "always")])
def test_resumed_run_ends_bit_equal(layout: Layout, config: Make, precision: str, reshardable: str) -> None:
    training = {"precision": precision, "mini_batch": 8}  # two updates a step
    settings = config(training=training, run={"reshardable": reshardable})
    policy = Policy(settings, layout)
    state = RunState(settings, policy)
    train(policy, state, 2)  # saved after the second step

    resumed = Policy(settings, layout)
    continued = load_latest(settings, resumed)
    assert (continued.step, continued.version, continued.cursor) == (2, 2, {"position": 2})
    assert differing(resumed, policy) == []

    train(policy, state, 1)
    train(resumed, continued, 1)
    assert differing(resumed, policy) == []
    assert float(dict(tensors(resumed))["learning rate 0"]) == pytest.approx(3e-4)


def test_random_state_is_restored(layout: Layout, config: Make) -> None:
    settings = config()
    state = RunState(settings, Policy(settings, layout))
    state.step = 1
    state.save()

    def draw() -> tuple[Any, ...]:
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(2).tolist()
        return random.random(), np.random.rand(), torch.rand(2).tolist(), tracked

    expected = draw()
    assert draw() != expected
    RunState(settings, Policy(settings, layout)).restore()
    assert draw() == expected


def test_state_of_a_run_that_took_no_step_yet(layout: Layout, config: Make) -> None:
    """Without Adam's moments it could be neither saved nor loaded."""
    settings = config()
    state = RunState(settings, Policy(settings, layout))
    state.finish_step({}, 0)
    state.save()
    policy = Policy(settings, layout)
    assert load_latest(settings, policy).step == 1
    assert not any(value.any() for name, value in tensors(policy) if name.startswith("exp_avg"))


def test_saves_are_due_every_second_step(layout: Layout, config: Make, tmp_path: Path) -> None:
    settings = config(run={"keep": 1})
    state = RunState(settings, Policy(settings, layout))
    (state_dir(tmp_path) / "step_000001.incomplete").mkdir(parents=True)
    seen = []
    for _ in range(5):
        state.finish_step({}, 1)
        seen.append(steps_kept(tmp_path))
    assert [names[-1] for names in seen[1:]] == ["step_000002", "step_000002", "step_000004", "step_000004"]
    state.save()
    assert steps_kept(tmp_path) == ["latest", "step_000005"]


def test_saving_starts_no_process(layout: Layout, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forking a process that has threads can hang for ever, and a helper outlives a killed trainer."""
    before = psutil.Process().children()
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    settings = config()
    state = RunState(settings, Policy(settings, layout))
    state.step = 1
    state.save()
    assert psutil.Process().children() == before


@pytest.mark.usefixtures("layout")
def test_failed_write_is_reported_and_the_next_save_works(tmp_path: Path) -> None:
    state_dict = {"x": ShardedTensor.from_rank_offsets("x", torch.arange(3.0))}
    blocked, free = tmp_path / "blocked", tmp_path / "free"
    (blocked / "__0_0.distcp").mkdir(parents=True)
    free.mkdir()
    with pytest.raises(CheckpointException, match="Is a directory"):
        dist_checkpointing.save(state_dict, str(blocked))
    dist_checkpointing.save(state_dict, str(free))
    assert torch.equal(dist_checkpointing.load(state_dict, str(free))["x"], torch.arange(3.0))


def test_saving_twice_writes_once(layout: Layout, config: Make) -> None:
    settings = config()
    state = RunState(settings, Policy(settings, layout))
    state.step = 2
    state.save()
    saved = latest_state(settings.run.dir)
    assert saved is not None
    before = (saved / "manifest.json").stat()
    state.save()
    assert (saved / "manifest.json").stat() == before


def test_run_without_a_state_starts_fresh(layout: Layout, config: Make) -> None:
    for resume in ("auto", "never"):
        settings = config(run={"resume": resume})
        state = load_latest(settings, Policy(settings, layout))
        assert (state.step, state.version, state.cursor) == (0, 0, {})


@pytest.fixture
def saved(layout: Layout, config: Make) -> Path:
    """The folder of a saved state."""
    settings = config()
    state = RunState(settings, Policy(settings, layout))
    state.step = 1
    state.save()
    return state_path(settings.run.dir, 1)


def test_never_refuses_a_folder_with_a_state(layout: Layout, config: Make, saved: Path) -> None:
    settings = config(run={"resume": "never"})
    with pytest.raises(UserError, match=f"run.resume=never, but {saved} holds a saved state"):
        load_latest(settings, Policy(settings, layout))


def test_damaged_state_is_refused(layout: Layout, config: Make, saved: Path) -> None:
    file = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    settings = config()
    with pytest.raises(UserError, match=f"{file.name} differs from its checksum"):
        load_latest(settings, Policy(settings, layout))


# The same on one rank, and yet another layout than none given.
OTHER: dict[str, Any] = {"parallel": {"pipeline_layers": [4]}}


def test_state_in_the_buffers_of_a_layout_fits_no_other_until_it_is_saved_again(layout: Layout, config: Make) -> None:
    """By a run at its layout that has no step to do."""
    long = config(run={"steps": 9, "save_every": 1})
    policy = Policy(long, layout)
    train(policy, RunState(long, policy), 1)
    elsewhere = config(**OTHER, run={"steps": 9})
    saved, remedy = state_path(long.run.dir, 1), "resume it there once with run.steps=1"
    refusal = (
        rf"{saved} was saved with the layout pipeline_layers=None, this run has pipeline_layers=\[4\], .* {remedy}"
    )
    with pytest.raises(UserError, match=refusal):
        load_latest(elsewhere, Policy(elsewhere, layout))
    load_latest(config(run={"steps": 1}), policy).save()
    resumed = Policy(elsewhere, layout)
    assert load_latest(elsewhere, resumed).step == 1
    assert differing(resumed, policy) == []


@pytest.mark.parametrize(
    ("reshardable", "steps", "expected"),
    [("last", 3, "dp dp fully"), ("last", 9, "dp dp dp"), ("always", 9, "fully fully fully")],
)
def test_states_for_all_layouts(
    layout: Layout, config: Make, tmp_path: Path, reshardable: str, steps: int, expected: str
) -> None:
    settings = config(run={"steps": steps, "save_every": 1, "keep": 9, "reshardable": reshardable})
    state = RunState(settings, Policy(settings, layout))
    for _ in range(3):
        state.finish_step({}, 0)
    kinds = [read_run(state_path(tmp_path, step))["optimizer"] for step in (1, 2, 3)]
    assert kinds == [f"{kind}_reshardable" for kind in expected.split()]
    state.save()  # the run ends here, whatever it was to do
    assert read_run(state_path(tmp_path, 3))["optimizer"] == "fully_reshardable"


def test_random_state_of_another_layout_is_left_there(layout: Layout, config: Make, saved: Path) -> None:
    settings = config(**OTHER)
    policy, _ = Policy(settings, layout), torch.rand(1)
    expected = torch.get_rng_state()
    assert RunState(settings, policy).restore()
    assert torch.equal(torch.get_rng_state(), expected)


def edit_run(state: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a state says of its run; its checksum follows."""
    run, manifest = (json.loads((state / name).read_text()) for name in (RUN, MANIFEST))
    change(run)
    (state / RUN).write_text(text := json.dumps(run))
    manifest[RUN] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (state / MANIFEST).write_text(json.dumps(manifest))


def test_state_of_an_earlier_version(layout: Layout, config: Make) -> None:
    """Stages were all alike, states all of one kind, and fewer things known of a model."""
    settings = config(run={"steps": 9, "save_every": 1})
    RunState(settings, Policy(settings, layout)).finish_step({}, 0)
    for place, key in ((None, "optimizer"), ("layout", "pipeline_layers"), ("model", "norm_topk_prob")):
        edit_run(state_path(settings.run.dir, 1), lambda run: (run[place] if place else run).pop(key))  # noqa: B023
    assert load_latest(settings, Policy(settings, layout)).step == 1


def test_saved_state_is_a_checkpoint_to_start_from(
    layout: Layout, config: Make, checkpoint: Callable[..., Path]
) -> None:
    """It starts another run with its weights, whose states are such checkpoints in turn."""
    settings = config()
    policy = Policy(settings, layout)
    train(policy, RunState(settings, policy), 2)
    state = state_path(settings.run.dir, 2)
    assert read_run(state)["model_path"] == str(checkpoint())
    reader = open_weights(state)
    assert reader.names() == [name for name, _ in policy.export()]
    assert all(torch.equal(reader(name), tensor) for name, tensor in policy.export())

    other = make_config(state, run={"dir": f"{settings.run.dir}/other"})
    second = Policy(other, layout)
    loaded, trained = dict(second.chunks[0].named_parameters()), dict(policy.chunks[0].named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in trained.items())
    RunState(other, second).save()
    again = Path(settings.run.dir, "other/state/step_000000")
    given = {path.name for path in checkpoint().iterdir() if path.suffix != ".safetensors"}
    found = {path.name for path in again.iterdir() if path.suffix != ".distcp"}
    assert found == given | {".metadata", "metadata.json", "common.pt", RUN, MANIFEST}


def test_state_of_another_model_or_precision_is_refused(layout: Layout, config: Make, saved: Path) -> None:
    llama, bf16 = config("llama"), config(training={"precision": "bf16"})
    with pytest.raises(
        UserError, match=f"{saved} was saved with the model hf_class=Qwen2ForCausalLM, qkv_bias=True, this"
    ):
        load_latest(llama, Policy(llama, layout))
    with pytest.raises(UserError, match=r"precision training.precision=fp32, this run has training.precision=bf16"):
        load_latest(bf16, Policy(bf16, layout))


PPO: dict[str, Any] = {"advantage": {"estimator": "gae"}}
CRITIC: dict[str, Any] = {"optimizer": {"lr": 1e-3, "warmup_steps": 10}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_critic_ends_bit_equal(layout: Layout, config: Make, precision: str) -> None:
    settings = config(algorithm=PPO, critic=CRITIC, training={"precision": precision, "mini_batch": 8})
    policy, critic = Policy(settings, layout), Critic(settings, layout)
    state = RunState(settings, policy, critic)
    train(policy, state, 2, critic)  # saved after the second step

    resumed = Policy(settings, layout), Critic(settings, layout)
    continued = load_latest(settings, *resumed)
    assert continued.step == 2
    assert differing(resumed[0], policy) + differing(resumed[1], critic) == []

    train(policy, state, 1, critic)
    train(resumed[0], continued, 1, resumed[1])
    assert differing(resumed[0], policy) + differing(resumed[1], critic) == []
    assert float(dict(tensors(resumed[1]))["learning rate 0"]) == pytest.approx(3e-4)


def test_damaged_critic_is_refused(layout: Layout, config: Make) -> None:
    settings = config(algorithm=PPO)
    state = RunState(settings, Policy(settings, layout), Critic(settings, layout))
    state.step = 1
    state.save()
    file = max((state_path(settings.run.dir, 1) / "critic").glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"critic/{file.name} differs from its checksum"):
        load_latest(settings, Policy(settings, layout), Critic(settings, layout))


def test_state_without_a_critic_is_refused(layout: Layout, config: Make, saved: Path) -> None:
    settings = config(algorithm=PPO)
    with pytest.raises(UserError, match=f"{saved} holds no critic, which algorithm.advantage.estimator=gae needs"):
        load_latest(settings, Policy(settings, layout), Critic(settings, layout))


def test_state_of_another_critic_is_refused(layout: Layout, config: Make, checkpoint: Callable[..., Path]) -> None:
    settings = config(algorithm=PPO)
    state = RunState(settings, Policy(settings, layout), Critic(settings, layout))
    state.step = 1
    state.save()
    other = config(algorithm=PPO, critic={"path": str(checkpoint("llama"))})
    with pytest.raises(UserError, match=r"was saved with the critic hf_class=Qwen2ForCausalLM, qkv_bias=True, this"):
        load_latest(other, Policy(other, layout), Critic(other, layout))


def test_run_without_a_critic_leaves_that_of_the_state(layout: Layout, config: Make) -> None:
    """Another estimator may go on from a run of PPO."""
    settings = config(algorithm=PPO)
    policy = Policy(settings, layout)
    state = RunState(settings, policy, Critic(settings, layout))
    state.step = 1
    state.save()
    plain = config()
    resumed = Policy(plain, layout)
    assert load_latest(plain, resumed).step == 1
    assert differing(resumed, policy) == []


def test_whole_states_are_saved_without_copies(layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """One rank has all of them: gathering would take 24 bytes for each parameter."""
    policy = Policy(make_config(checkpoint(), run={"dir": str(tmp_path)}), layout)
    optimizer = policy.optimizer.chained_optimizers[0]
    saved = _sharded(policy, FULLY_RESHARDABLE, loading=False)["optimizer"]["param_state"]
    held = {
        state[kind].data_ptr() for state in optimizer.optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq")
    }
    found = [tensors[kind].data.data_ptr() for tensors in saved.values() for kind in ("exp_avg", "exp_avg_sq")]
    assert len(found) == len(set(found)) == len(held) > 20
    assert set(found) == held
