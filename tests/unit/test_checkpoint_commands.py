"""The commands about checkpoints: what they print, what they refuse, and their exit codes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch

from dapo_megatron import cli
from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.journal import Workspace
from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config
from tests.checkpoints import files_of, load_tensors, random_checkpoint, save_tensors
from tests.models import REPOSITORY

Said = tuple[int, str, str]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run a command: exit code, output and errors, without the line ends that a terminal's width asks for."""

    def run(*arguments: Any) -> Said:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with experts in both forms. Not to be changed."""
    folder = tmp_path_factory.mktemp("folders")
    hf = random_checkpoint(folder / "hf", "qwen3_moe", dtype=torch.bfloat16)
    options = ["--tp", "2", "--pp", "2", "--vpp", "2", "--ep", "4", "--etp", "2"]
    assert cli.main(["convert", "--hf", str(hf), "--out", str(folder / "megatron"), *options]) == 0
    return {"hf": hf, "megatron": folder / "megatron"}


@pytest.fixture(scope="module")
def run_dir(layout: Layout, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a critic. Not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    gae = {"algorithm": {"advantage": {"estimator": "gae"}}}
    config = make_config(checkpoint("qwen2"), run={"dir": str(folder)}, **gae)
    state = RunState(config, Policy(config, layout), Critic(config, layout))
    state.step = 7
    state.save()
    return folder


def test_there_and_back(folders: dict[str, Path], say: Callable[..., Said], tmp_path: Path) -> None:
    summary = (
        r"{}: 183 tensors, 0\.000 GB in \d+\.\d s\nverified: 183 tensors read again, all as in the manifest \(.* s\)\n"
    )
    hf, back = folders["hf"], tmp_path / "back"
    for command in (
        ("convert", "--hf", hf, "--pp", 3, "--pp-layers", "2,1,1"),
        ("reshard", "--checkpoint", tmp_path / "convert", "--ep", 2),
        ("export", "--checkpoint", tmp_path / "reshard", "--max-shard-gb", 1),
    ):
        out = tmp_path / command[0]
        code, printed, _ = say(*command, "--out", out, "--verify")
        assert code == 0
        assert re.fullmatch(summary.format(out), printed)
    assert files_of(tmp_path / "export", "tensors.json") == files_of(hf)
    assert say("export", "--checkpoint", tmp_path / "convert", "--out", back, "--max-shard-gb", 3e-5)[0] == 0
    assert len(list(back.glob("model-*.safetensors"))) > 3
    assert say("compare-weights", back, tmp_path / "reshard")[:2] == (0, "all 183 tensors are equal, byte by byte\n")


def test_state_of_a_run(run_dir: Path, say: Callable[..., Said], tmp_path: Path) -> None:
    """Its newest state is meant by its folder."""
    assert say("reshard", "--checkpoint", run_dir, "--out", tmp_path / "run", "--tp", 2, "--verify")[0] == 0
    assert (tmp_path / "run" / "state" / "latest").read_text() == "step_000007\n"
    for folder in (run_dir, tmp_path / "run"):
        assert say("export", "--checkpoint", folder, "--out", tmp_path / folder.name / "hf", "--verify")[0] == 0
    assert say("compare-weights", *(tmp_path / folder.name / "hf" for folder in (run_dir, tmp_path / "run")))[0] == 0


def test_verify_fails_where_the_result_is_not_what_was_written(
    folders: dict[str, Path], say: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Workspace.publish

    def publish_and_damage(self: Workspace) -> None:
        publish(self)
        file = tmp_path / "out" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x11")

    monkeypatch.setattr(Workspace, "publish", publish_and_damage)
    code, _, error = say("export", "--checkpoint", folders["megatron"], "--out", tmp_path / "out", "--verify")
    assert code == cli.USER_ERROR
    assert f"{tmp_path / 'out'} is not what was written: " in error


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "tp": (("--tp", "3"), "--tp=3 does not divide 4 attention heads and 4 key/value heads of hf; use 1, 2 or 4"),
    "pp": (("--pp", "3"), "--pp=3 does not divide 4 layers of hf; use 1, 2 or 4, or say in --pp-layers how many"),
    "vpp": (("--vpp", "2"), "--vpp=2 needs --pp > 1"),
    "ep": (("--ep", "5"), "--ep=5 does not divide 12 experts of hf; use 1, 2, 3, 4, 6 or 12"),
    "etp": (("--etp", "3"), "--etp=3 does not divide the MLP size 8 of each expert of hf; use 1, 2, 4 or 8"),
    "zero": (("--pp", "0"), "--pp 0: must be at least 1"),
    "layers": (("--pp", "2", "--pp-layers", "4,1"), r"--pp-layers=[4, 1] must be numbers of at least 1 that add up"),
    "count": (("--pp", "2", "--pp-layers", "4"), r"--pp-layers=[4] has 1 numbers; it needs --pp x --vpp = 2 x 1 = 2"),
    "text": (("--pp-layers", "4,a"), "--pp-layers 4,a: must be numbers with commas"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_layout_that_the_model_cannot_have(
    what: str, folders: dict[str, Path], say: Callable[..., Said], tmp_path: Path
) -> None:
    """In the options' own names."""
    options, message = REFUSED[what]
    for command, source in (("convert --hf", folders["hf"]), ("reshard --checkpoint", folders["megatron"])):
        code, printed, error = say(*command.split(), source, "--out", tmp_path / "out", *options)
        assert (code, printed) == (cli.USER_ERROR, "")
        assert error.startswith(f"dapo-megatron: {message.replace('of hf', f'of {source.name}')}")
        assert "parallel." not in error
        assert not list(tmp_path.iterdir())


def test_folders_of_the_wrong_kind(
    folders: dict[str, Path], run_dir: Path, say: Callable[..., Said], tmp_path: Path
) -> None:
    hf, megatron, out = folders["hf"], folders["megatron"], tmp_path / "out"
    neither = "is neither a Megatron checkpoint nor the folder of a run with a state"
    for arguments, message in (
        (("convert", "--hf", megatron, "--out", out), f"--hf: {megatron} has neither model.safetensors nor"),
        (("export", "--checkpoint", hf, "--out", out), f"--checkpoint: {hf} {neither}"),
        (("reshard", "--checkpoint", tmp_path, "--out", out), f"--checkpoint: {tmp_path} {neither}"),
        (("inspect", tmp_path), f"inspect: {tmp_path}/config.json does not exist"),
        (("compare-weights", hf, tmp_path), f"compare-weights: {tmp_path} has neither model.safetensors nor"),
        (("export", "--checkpoint", megatron, "--out", out, "--max-shard-gb", 0), "--max-shard-gb 0.0: must be more"),
    ):
        code, printed, error = say(*arguments)
        assert (code, printed) == (cli.USER_ERROR, "")
        assert error.startswith(f"dapo-megatron: {message}")


def table(printed: str) -> list[list[str]]:
    """The cells of each line of a table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
def test_inspect_a_conversion(folders: dict[str, Path], say: Callable[..., Said]) -> None:
    code, printed, _ = say("inspect", folders["megatron"])
    assert code == 0
    for line in (
        f"folder            {folders['megatron']}",
        "model             Qwen3MoeForCausalLM: 4 layers of 32, 12 experts, vocabulary 151, untied",
        "format            Megatron distributed checkpoint (torch_dist)",
        "layout            tensor 2, pipeline 2, virtual_pipeline 2, expert 4, expert_tensor 2",
        "optimizer states  none",
        "critic            no",
        "manifest          tensors.json",
    ):
        assert line in printed.splitlines()
    rows = table(printed)
    assert ["embedding.word_embeddings.weight", "152 x 32", "bfloat16", "1", "2"] in rows
    experts = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert [experts, "4 x 12 x 16 x 32", "bfloat16", "1", str(4 * 12 * 2 * 2)] in rows


@pytest.mark.usefixtures("wide")
def test_inspect_a_hugging_face_folder(folders: dict[str, Path], say: Callable[..., Said]) -> None:
    code, printed, _ = say("inspect", folders["hf"])
    assert code == 0
    assert "format            Hugging Face (safetensors)" in printed
    assert "manifest          none" in printed
    assert ["model.layers.*.mlp.experts.*.gate_proj.weight", "8 x 32", "bfloat16", "48", "48"] in table(printed)


@pytest.mark.usefixtures("wide")
def test_inspect_a_run(run_dir: Path, say: Callable[..., Said]) -> None:
    code, printed, _ = say("inspect", run_dir)
    assert code == 0
    for line in (
        "step              7",
        "layout            one rank",
        "optimizer states  optimizer.state.exp_avg, optimizer.state.exp_avg_sq, optimizer.state.param",
        "critic            yes",
    ):
        assert line in printed.splitlines()
    assert [
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight",
        "4 x 64 x 96",
        "float32",
        "1",
        "4",
    ] in table(printed)


@pytest.mark.usefixtures("wide")
def test_compare_different_weights(folders: dict[str, Path], say: Callable[..., Said], tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert say("export", "--checkpoint", folders["megatron"], "--out", other)[0] == 0
    tensors = load_tensors(other)
    norm, gate, lost, router = (
        "model.norm.weight",
        "model.layers.2.mlp.experts.10.gate_proj.weight",
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "model.layers.3.mlp.gate.weight",
    )
    tensors[norm] = tensors[norm].float()
    tensors[gate][0, 0] += 3
    tensors[router] = tensors[router][:-1].clone()
    tensors["extra"] = tensors.pop(lost)
    save_tensors(other, tensors)
    code, printed, _ = say("compare-weights", folders["megatron"], other)
    assert code == 1
    rows = {row[0]: row[1:3] for row in table(printed)}
    assert rows == {
        lost: [f"only in {folders['megatron']}", ""],
        "extra": [f"only in {other}", ""],
        norm: ["bfloat16 and float32", "0"],
        gate: ["", "3"],
        router: ["(12, 32) and (11, 32)", ""],
    }
    assert printed.endswith("5 of 184 tensors differ, by at most 3\n")


def test_rounding_is_measured(folders: dict[str, Path], say: Callable[..., Said], tmp_path: Path) -> None:
    """Between dtypes: 16-bit numbers in fp32 are equal, and not byte by byte."""
    assert say("export", "--checkpoint", folders["megatron"], "--out", tmp_path / "a", "--dtype", "float32")[0] == 0
    code, printed, _ = say("compare-weights", folders["hf"], tmp_path / "a")
    assert code == 1
    assert printed.endswith("183 of 183 tensors differ, by at most 0\n")


def test_command_line_loads_no_torch_for_them() -> None:
    """Until one runs."""
    code = "import sys; from dapo_megatron import cli; cli._parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60, check=False).returncode == 0


def test_padding_is_zero(folders: dict[str, Path]) -> None:
    whole = DistReader(folders["megatron"]).read("output_layer.weight")
    assert whole.shape == (152, 32)
    assert not whole[151:].any()
    assert whole[:151].any(dim=1).all()
