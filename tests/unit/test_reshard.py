"""A run's state as the shards of another layout: a run that continues from it does so as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch

from dapo_megatron.checkpoint import reshard as resharding
from dapo_megatron.checkpoint.compare import differences, verify_folder
from dapo_megatron.checkpoint.convert import megatron_to_hf
from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.manifest import read_manifest
from dapo_megatron.checkpoint.reshard import find_checkpoint, reshard
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.run_state.checkpoint import RunState, load_latest
from dapo_megatron.run_state.store import latest_state, read_run, verify
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config
from tests.checkpoints import digests, files_of, load_tensors
from tests.training import differing, train

GAE = {"algorithm": {"advantage": {"estimator": "gae"}}}
SPREAD = ParallelConfig.model_validate({"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2})
EXPERTS = SPREAD.model_copy(update={"expert": 2, "expert_tensor": 2})


class Run:
    """A run of one rank, after a step, whose state is saved for all layouts."""

    def __init__(self, model: Path, layout: Layout, folder: Path, *, critic: bool) -> None:
        self.sections: dict[str, Any] = GAE if critic else {}
        self.model, self.layout, self.has_critic = model, layout, critic
        self.folder = folder
        self.policy, self.critic = self.make(folder)
        self.state = RunState(self.config(folder), self.policy, self.critic)
        train(self.policy, self.state, 1, self.critic)
        self.state.save()
        self.saved = find_checkpoint(folder)

    def config(self, folder: Path) -> Any:
        return make_config(self.model, run={"dir": str(folder)}, optimizer={"lr": 1e-3}, **self.sections)

    def make(self, folder: Path) -> tuple[Policy, Critic | None]:
        config = self.config(folder)
        return Policy(config, self.layout), Critic(config, self.layout) if self.has_critic else None

    def continued(self, folder: Path) -> list[str]:
        """What differs in a run that continues from another folder."""
        policy, critic = self.make(folder)
        state = load_latest(self.config(folder), policy, critic)
        assert (state.step, state.version, state.cursor) == (1, 1, {"position": 1})
        wrong = differing(policy, self.policy)
        return wrong + (differing(critic, self.critic) if critic is not None and self.critic is not None else [])


@pytest.fixture(scope="module")
def dense(layout: Layout, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Tied embeddings of 151 rows, and a critic."""
    return Run(checkpoint("qwen2"), layout, tmp_path_factory.mktemp("dense"), critic=True)


@pytest.fixture(scope="module")
def experts(layout: Layout, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(checkpoint("mixtral", tied=False), layout, tmp_path_factory.mktemp("experts"), critic=False)


@pytest.mark.parametrize(("name", "parallel"), [("dense", SPREAD), ("experts", EXPERTS)])
def test_run_continues_from_its_resharded_state(
    name: str, parallel: ParallelConfig, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Weights, fp32 weights, moments and schedules are equal bit by bit, also when it was resharded twice."""
    run: Run = request.getfixturevalue(name)
    before = files_of(run.folder)
    first = reshard(run.saved, tmp_path / "first", parallel)
    second = reshard(find_checkpoint(tmp_path / "first"), tmp_path / "second", ParallelConfig.model_validate({}))
    for done, sizes in ((first, parallel), (second, ParallelConfig.model_validate({}))):
        assert latest_state(tmp_path / done.folder.parts[-3]) == done.folder
        verify(done.folder)
        count = len(done.manifest.tensors)
        assert verify_folder(done.folder) == count + (count + 4 if run.has_critic else 0)  # a head, its optimizer's
        assert read_run(done.folder)["layout"] == sizes.layout(0)
        assert run.continued(tmp_path / done.folder.parts[-3]) == []
    assert first.manifest.tensors == second.manifest.tensors
    assert files_of(run.folder) == before


@pytest.mark.parametrize(("name", "parallel"), [("dense", SPREAD), ("experts", EXPERTS)])
def test_optimizer_lies_where_its_weights_do(
    name: str, parallel: ParallelConfig, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reader = DistReader(reshard(request.getfixturevalue(name).saved, tmp_path / "out", parallel).folder)
    weights = [key for key in reader.tensors if not key.startswith("optimizer.")]
    assert len(weights) * 4 == len(reader.tensors)
    for key in weights:
        boxes = [(chunk.offset, chunk.shape, chunk.file) for chunk in reader.chunks(key)]
        for state in ("param", "exp_avg", "exp_avg_sq"):
            found = reader.chunks(f"optimizer.state.{state}.{key}")
            assert [(chunk.offset, chunk.shape, chunk.file) for chunk in found] == boxes
    assert reader.tensors["embedding.word_embeddings.weight"][0][0] == 152
    assert not any(key.startswith("random") for key in reader.objects)


def test_weights_alone(experts: Run, tmp_path: Path) -> None:
    """A checkpoint without a run, that exports what the run's state exports."""
    done = reshard(experts.saved, tmp_path / "weights", EXPERTS, weights_only=True)
    assert done.folder == tmp_path / "weights"
    assert not {path.name for path in done.folder.iterdir()} & {"run.json", "critic", "manifest.json"}
    assert not list(differences(experts.saved, done.folder))
    for folder, name in ((experts.saved, "a"), (done.folder, "b")):
        megatron_to_hf(folder, tmp_path / name)
    assert files_of(tmp_path / "a", "tensors.json") == files_of(tmp_path / "b", "tensors.json")
    exported = digests(load_tensors(tmp_path / "a"))
    found = {name: (r.shape, r.dtype, r.sha256) for name, r in read_manifest(tmp_path / "a").tensors.items()}
    assert found == exported


def test_state_of_one_layout_alone(layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = make_config(checkpoint("qwen2"), run={"dir": str(tmp_path / "run"), "save_every": 1, "steps": 9})
    policy = Policy(config, layout)
    train(policy, RunState(config, policy), 1)
    state = find_checkpoint(tmp_path / "run")
    message = r"--checkpoint: .*step_000001 holds .*\(dp_reshardable\), .* continue .* run\.steps=1, .* --weights-only"
    with pytest.raises(UserError, match=message):
        reshard(state, tmp_path / "out", SPREAD)
    assert not list(tmp_path.glob("out*"))
    reshard(state, tmp_path / "out", SPREAD, weights_only=True)
    assert not list(differences(state, tmp_path / "out"))


def test_folder_with_other_states_is_left_alone(dense: Run, tmp_path: Path) -> None:
    """A run keeps but a few states: the others would be removed."""
    out = tmp_path / "out"
    reshard(dense.saved, out, SPREAD)
    (out / "state" / "step_000001").rename(out / "state" / "step_000000")
    before = files_of(out)
    with pytest.raises(UserError, match=f"--out: {out} exists already"):
        reshard(dense.saved, out, SPREAD)
    assert files_of(out) == before


class StopError(Exception):
    """In place of whatever ends a process."""


@pytest.mark.parametrize("where", ["copy_without_weights", "_reshard_critic", "publish"])
def test_interrupted_late(where: str, dense: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the weights are written, before the critic, and before the state gets its name: it has none until then."""

    def stop(*_: Any, **__: Any) -> None:
        raise StopError

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(resharding, where, stop)
        with pytest.raises(StopError):
            reshard(dense.saved, out, SPREAD)
    assert latest_state(out) is None
    assert not (out / "state" / "step_000001").exists()
    done = reshard(dense.saved, out, SPREAD)
    assert [path.name for path in (out / "state").iterdir()] == ["latest", done.folder.name]
    undisturbed = reshard(dense.saved, tmp_path / "other", SPREAD)
    assert files_of(out) == files_of(tmp_path / "other")
    assert torch.equal(*(DistReader(d.folder / "critic").read("output_layer.weight") for d in (done, undisturbed)))
