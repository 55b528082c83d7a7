"""What conversions read: damaged states, layers that are not trained, manifests beside the files, mixed dtypes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from torch import Tensor

from dapo_megatron.checkpoint.compare import verify_folder
from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.checkpoint.export import export_hf
from dapo_megatron.checkpoint.manifest import read_manifest
from dapo_megatron.checkpoint.megatron import MegatronCheckpoint
from dapo_megatron.checkpoint.reshard import find_checkpoint, reshard
from dapo_megatron.checkpoint.source import HFSource, MegatronSource, extra_layers
from dapo_megatron.checkpoint.untrained import Untrained
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config
from tests.checkpoints import digests, files_of, load_tensors, random_checkpoint, save_tensors

ONE = ParallelConfig.model_validate({})
TWO = ParallelConfig.model_validate({"tensor": 2, "sequence": True})
MTP = "model.layers.4."  # of a model of four layers
DOWN = MTP + "mlp.experts.7.down_proj.weight"
COPIES = (MTP + "embed_tokens.weight", MTP + "shared_head.head.weight")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """As a conversion does it: the biases of routers stay as they are."""
    return {name: t if name.endswith("e_score_correction_bias") else t.to(dtype) for name, t in tensors.items()}


# --- states of runs ----------------------------------------------------------------------------------------------


def saved_run(model: Path, folder: Path, layout: Layout, **sections: Any) -> tuple[Any, Policy]:
    """A run before its first step, with its state saved."""
    config = make_config(model, run={"dir": str(folder)}, **sections)
    policy = Policy(config, layout)
    RunState(config, policy, Critic(config, layout) if sections else None).save()
    return config, policy


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "export": megatron_to_hf,
    "reshard": lambda checkpoint, out: reshard(checkpoint, out, ONE),
    "weights only": lambda checkpoint, out: reshard(checkpoint, out, ONE, weights_only=True),
}


def test_a_damaged_state_is_not_passed_on(layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Whichever of its files it is: the policy's, or the critic's, also where that would not be read."""
    run, gae = tmp_path / "run", {"advantage": {"estimator": "gae"}}
    saved_run(checkpoint("qwen2"), run, layout, algorithm=gae)
    state = find_checkpoint(run)
    for file in ("__0_0.distcp", "critic/__0_0.distcp"):
        middle = (state / file).stat().st_size // 2
        flip(state / file, middle)
        for command in COMMANDS.values():
            with pytest.raises(UserError, match=rf"{state} is damaged: {file} differs from its checksum"):
                command(state, tmp_path / "out")
        flip(state / file, middle)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    for name, command in COMMANDS.items():
        command(state, tmp_path / name)


# --- layers that are not trained ---------------------------------------------------------------------------------


class Trained:
    """A DeepSeek model with a layer for multi-token prediction, and a run that started from it."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.hf = random_checkpoint(folder / "hf", "deepseek_v3", num_nextn_predict_layers=1)
        self.tensors = load_tensors(self.hf)
        self.config, self.policy = saved_run(self.hf, folder / "run", layout)
        self.state = find_checkpoint(folder / "run")
        self.layers = extra_layers(architecture_of(self.hf))


@pytest.fixture(scope="module")
def trained(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), layout)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("way", ["state", "reshard", "weights only", "twice", "base"])
def test_what_training_left_out_comes_back(
    way: str, dtype: torch.dtype | None, trained: Trained, tmp_path: Path
) -> None:
    """From where the run started, whatever was made of its state."""
    folder, base = trained.state, None
    if way != "state":
        folder = reshard(folder, tmp_path / "one", TWO, weights_only=way != "reshard").folder
    if way == "twice":
        folder = reshard(folder, tmp_path / "two", ONE, weights_only=True).folder
    if way == "base":
        base = hf_to_megatron(trained.hf, tmp_path / "base", TWO).folder
    megatron_to_hf(folder, tmp_path / "out", base=base, dtype=dtype)
    assert digests(load_tensors(tmp_path / "out")) == digests(cast(trained.tensors, dtype or torch.float32))
    assert verify_folder(tmp_path / "out") == len(trained.tensors)


def test_the_model_that_a_run_exports_is_whole(trained: Trained) -> None:
    export_hf(trained.config, trained.policy)
    exported = Path(trained.config.run.dir) / "hf"
    assert files_of(exported) == files_of(trained.hf)


def test_a_run_that_started_from_weights_without_the_layer(trained: Trained, tmp_path: Path) -> None:
    """They say where the layer is, and so on; a model that was published without is left without."""
    weights = reshard(trained.state, tmp_path / "weights", ONE, weights_only=True).folder
    assert {name for name, _ in Untrained(trained.layers, weights, None)} == {n for n in trained.tensors if MTP in n}
    without = without_mtp(trained, tmp_path / "without")
    assert Untrained(trained.layers, without, None).entries == []
    hf_to_megatron(without, tmp_path / "megatron", ONE)
    assert Untrained(trained.layers, tmp_path / "megatron", None).entries == []


def without_mtp(trained: Trained, folder: Path) -> Path:
    return changed(trained, folder, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(MTP)})


def changed(trained: Trained, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The Hugging Face folder with other tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((trained.hf / "config.json").read_text())
    save_tensors(folder, change(trained.tensors))
    return folder


def drop(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


BAD_BASES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "no layer": (lambda t: {n: x for n, x in t.items() if MTP not in n}, rf"--base: .* has no tensor {MTP}enorm"),
    "part of one": (drop(DOWN), rf"lacks {DOWN}, but holds {MTP}embed_tokens\.weight of the same layer"),
    "other shape": (
        lambda t: t | {DOWN: t[DOWN][:-1].clone()},
        rf"{DOWN} has the shape \(31, 24\), but the model needs",
    ),
    "quantised": (lambda t: t | {DOWN: t[DOWN].to(torch.float8_e4m3fn)}, rf"{DOWN} is torch.float8_e4m3fn; only float"),
}


@pytest.mark.parametrize("fault", BAD_BASES)
def test_base_that_does_not_fit(fault: str, trained: Trained, tmp_path: Path) -> None:
    change, message = BAD_BASES[fault]
    base = changed(trained, tmp_path / "base", change)
    with pytest.raises(UserError, match=message):
        megatron_to_hf(trained.state, tmp_path / "out", base=base)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_base_that_is_gone_or_damaged(trained: Trained, tmp_path: Path) -> None:
    none = tmp_path / "none"
    with pytest.raises(UserError, match=rf"--base: {none}, which should have {MTP}enorm\.weight, is not a folder"):
        megatron_to_hf(trained.state, tmp_path / "out", base=none)
    with pytest.raises(UserError, match=rf"{MTP}enorm\.weight is in no .* {none} is not here: export with --base DIR"):
        Untrained(trained.layers, none, None)
    base = changed(trained, tmp_path / "base", dict)
    hf_to_megatron(base, tmp_path / "megatron", ONE)
    read_manifest(tmp_path / "megatron").write(base)
    tensors = load_tensors(base)
    save_tensors(base, tensors | {DOWN: tensors[DOWN] + 1})
    with pytest.raises(UserError, match=rf"{base} is damaged: {DOWN} is not what its tensors\.json says"):
        megatron_to_hf(trained.state, tmp_path / "out", base=base, dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [DOWN, MTP + "mlp.experts.3.gate_proj.weight", MTP + "enorm.weight"])
def test_a_part_of_a_layer_is_refused(name: str, trained: Trained, tmp_path: Path) -> None:
    hf = changed(trained, tmp_path / "hf", drop(name))
    with pytest.raises(UserError, match=f"{hf} lacks {name}, but holds {MTP}embed"):
        hf_to_megatron(hf, tmp_path / "out", ONE)


def test_copies_in_the_layer_may_be_absent(trained: Trained, tmp_path: Path) -> None:
    hf = changed(trained, tmp_path / "hf", drop(*COPIES))
    hf_to_megatron(hf, tmp_path / "megatron", TWO)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
    assert digests(load_tensors(tmp_path / "out")) == digests(load_tensors(hf))
    found = MegatronCheckpoint(tmp_path / "megatron")
    found.rows = [row for row in found.rows if "enorm" not in row.name]
    with pytest.raises(UserError, match=rf"megatron lacks {MTP}enorm\.weight"):
        MegatronSource(found, weights_only=True)


# --- manifests and dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_folder_that_is_not_what_its_manifest_says(dtype: torch.dtype | None, tmp_path: Path) -> None:
    hf_to_megatron(random_checkpoint(tmp_path / "first", "qwen2", tied=True), tmp_path / "megatron", ONE)
    hf = megatron_to_hf(tmp_path / "megatron", tmp_path / "hf").folder
    assert HFSource(hf).known == read_manifest(hf).tensors
    flip(hf / "model.safetensors", -2)
    with pytest.raises(UserError, match=rf"{hf} is damaged: model\.\S+ is not what its tensors\.json says"):
        hf_to_megatron(hf, tmp_path / "out", TWO, dtype=dtype)
    assert not (tmp_path / "out").exists()


# Within one parameter, and in one of the layers that lie in one tensor.
MIXED = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight")


@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes_need_one_to_be_chosen(name: str, tmp_path: Path) -> None:
    hf = random_checkpoint(tmp_path / "hf", "qwen2")
    tensors = load_tensors(hf)
    tensors[name] = tensors[name].half()
    save_tensors(hf, tensors)
    with pytest.raises(UserError, match=rf"{name} is torch.float16, but .* torch.float32, .*: choose .* with --dtype"):
        hf_to_megatron(hf, tmp_path / "out", TWO)
    for dtype in (torch.float32, torch.bfloat16):
        megatron, back = tmp_path / f"to {dtype}", tmp_path / f"from {dtype}"
        hf_to_megatron(hf, megatron, TWO, dtype=dtype)
        assert verify_folder(megatron) == len(tensors)
        megatron_to_hf(megatron, back)
        assert digests(load_tensors(back)) == digests(cast(tensors, dtype))


def test_mixed_buffers_are_not_cast(tmp_path: Path) -> None:
    hf = random_checkpoint(tmp_path / "hf", "deepseek_v3_plain")
    name, tensors = "model.layers.1.mlp.gate.e_score_correction_bias", load_tensors(hf)
    save_tensors(hf, tensors | {name: tensors[name].bfloat16()})
    with pytest.raises(UserError, match=rf"{name} is torch.bfloat16, but .* keeps both in one tensor$"):
        hf_to_megatron(hf, tmp_path / "out", ONE, dtype=torch.float32)
