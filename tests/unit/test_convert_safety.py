"""Conversions do no harm: not to each other, not to what lies beside them, and not when a source goes away."""

import errno
import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch

from dapo_megatron import cli
from dapo_megatron.checkpoint import compare
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.journal import Workspace, lock_path
from dapo_megatron.errors import UserError
from dapo_megatron.run_state import store
from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config
from tests.checkpoints import files_of, load_tensors, random_checkpoint, save_tensors
from tests.models import REPOSITORY
from tests.quantization import WIDE, write_model, write_prompts

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command: exit code, output, errors."""

    def of(*arguments: Any) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return of


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return random_checkpoint(tmp_path_factory.mktemp("source") / "hf", "qwen2")


HOLDING = """
import sys, time
from pathlib import Path
from dapo_megatron.checkpoint.journal import Workspace
workspace = Workspace(Path(sys.argv[1]), {}, lambda: None)
workspace.add({"item": "a"}, 1)
workspace.commit()
print("held", flush=True)
time.sleep(60)
"""


def test_two_conversions_into_one_place(hf: Path, run: Run, tmp_path: Path) -> None:
    """The second is refused and changes nothing, whatever it converts, as long as the first one lives."""
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(out)], cwd=REPOSITORY, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        before = files_of(tmp_path)
        code, _, error = run("convert", "--hf", hf, "--out", out)
        assert code == cli.USER_ERROR
        assert error == f"dapo-megatron: --out: another conversion writes to {out} at this moment: wait for it\n"
        assert files_of(tmp_path) == before
        first.kill()
    assert run("convert", "--hf", hf, "--out", out, "--verify")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_lock_that_was_released_while_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other conversion has just published its result: it must not be made again."""
    out = tmp_path / "out"
    flock = fcntl.flock

    def released(file: Any, operation: int) -> None:
        lock_path(out).unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", released)
    with pytest.raises(UserError, match="another conversion writes to"):
        Workspace(out, {}, lambda: None)
    assert not list(tmp_path.iterdir())


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    Workspace(tmp_path / "out", {}, lambda: None).publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_its_last_two_steps(tmp_path: Path) -> None:
    """Without a journal the folder is still known for a conversion's: by its lock."""
    workspace = Workspace(tmp_path / "out", {}, lambda: None)
    (workspace.folder / "tensors").write_text("all")
    workspace.finish()
    again = Workspace(tmp_path / "out", {}, lambda: None)
    assert [path.name for path in again.folder.iterdir()] == ["progress-0.jsonl"]
    again.publish()


@pytest.mark.parametrize("name", ["out.incomplete", "out.incomplete/deeper"])
def test_folder_of_the_user_in_the_way(name: str, hf: Path, run: Run, tmp_path: Path) -> None:
    """Refused twice: the first refusal leaves nothing that lets the second take it for ours."""
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "thesis.txt").write_text("mine")
    for _ in range(2):
        code, _, error = run("convert", "--hf", hf, "--out", tmp_path / "out")
        assert code == cli.USER_ERROR
        assert f"--out: {tmp_path / 'out.incomplete'} is in the way, and no conversion has left it" in error
    assert [str(path) for path in files_of(tmp_path)] == [f"{name}/thesis.txt"]


def test_result_that_could_not_be_renamed(hf: Path, run: Run, tmp_path: Path) -> None:
    """An empty folder makes way; one that cannot, such as a mount point or a link, is refused before the work."""
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    code, _, error = run("convert", "--hf", hf, "--out", tmp_path / "out")
    assert code == cli.USER_ERROR
    assert f"--out: {tmp_path / 'out'} cannot be replaced by the result" in error
    assert {path.name for path in tmp_path.iterdir()} == {"out", "real"}
    assert run("convert", "--hf", hf, "--out", tmp_path / "real", "--verify")[0] == 0


@pytest.mark.parametrize("out", [".", "/", "", "..", "below/.."])
@pytest.mark.parametrize("command", ["convert --hf x", "quantize --model x --prompts x"])
def test_out_without_a_name(command: str, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--out", out])
    assert ended.value.code == cli.USER_ERROR
    assert f"argument --out: {out!r} is not the name of a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["nan", "inf", "-1"])
def test_size_of_files_that_is_no_size(size: str, run: Run, tmp_path: Path) -> None:
    code, _, error = run("export", "--checkpoint", tmp_path, "--out", tmp_path / "out", "--max-shard-gb", size)
    assert code == cli.USER_ERROR
    assert "--max-shard-gb" in error
    assert "must be more than 0, and a number" in error


def test_differences_that_are_no_numbers(hf: Path, run: Run, tmp_path: Path) -> None:
    """Neither before nor after larger ones."""
    shutil.copytree(hf, tmp_path / "other")
    tensors = load_tensors(hf)
    names = sorted(tensors)
    for name, value in ((names[0], 1e3), (names[1], torch.nan), (names[2], 1e6)):
        tensors[name].view(-1)[0] = value
    save_tensors(tmp_path / "other", tensors)
    code, printed, _ = run("compare-weights", hf, tmp_path / "other")
    assert code == 1
    assert printed.endswith(f"3 of {len(names)} tensors differ, some by NaN\n")


def count_calls(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Note each time that all names of a checkpoint are listed: for every tensor that would take quadratic time."""
    names = HFReader.names

    def counting(self: HFReader) -> list[str]:
        calls.append(1)
        return names(self)

    monkeypatch.setattr(HFReader, "names", counting)


def test_names_are_listed_once(hf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "other")
    save_tensors(tmp_path / "other", {f"other.{name}": tensor for name, tensor in load_tensors(hf).items()})
    calls: list[int] = []
    count_calls(monkeypatch, calls)
    found = list(compare.differences(hf, tmp_path / "other"))
    assert len(found) == 2 * len(load_tensors(hf))
    assert len(calls) <= 4


@pytest.fixture(scope="module")
def run_dir(layout: Layout, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, saved when its model.path was gone. Not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    model = shutil.copytree(checkpoint("qwen2"), folder / "model")
    config = make_config(model, run={"dir": str(folder / "run")})
    state = RunState(config, Policy(config, layout))
    shutil.rmtree(model)
    state.step = 3
    state.save()
    return folder / "run"


def test_model_that_is_removed_during_a_run(run_dir: Path, checkpoint: Callable[..., Path]) -> None:
    """Every state stands alone all the same."""
    state = store.latest_state(run_dir)
    assert state is not None
    store.verify(state)
    small = {path.name for path in checkpoint("qwen2").iterdir() if ".safetensors" not in path.name}
    assert "config.json" in small
    for name in small:
        assert (state / name).read_bytes() == (checkpoint("qwen2") / name).read_bytes()


def test_folder_of_a_run_is_compared(run_dir: Path, run: Run, tmp_path: Path) -> None:
    assert run("export", "--checkpoint", run_dir, "--out", tmp_path / "hf")[0] == 0
    code, printed, _ = run("compare-weights", run_dir, tmp_path / "hf")
    assert code == 0
    assert "equal, byte by byte" in printed
    (tmp_path / "empty" / "state").mkdir(parents=True)
    code, _, error = run("compare-weights", run_dir, tmp_path / "empty")
    assert code == cli.USER_ERROR
    assert error.startswith(
        f"dapo-megatron: compare-weights: {tmp_path / 'empty'} is neither a Megatron checkpoint nor"
    )


@pytest.mark.parametrize("command", ["inspect", "compare-weights"])
def test_megatron_checkpoint_without_config(command: str, run_dir: Path, run: Run, tmp_path: Path) -> None:
    state = store.latest_state(run_dir)
    assert state is not None
    folder = shutil.copytree(state, tmp_path / "state")
    (folder / "config.json").unlink()
    code, _, error = run(command, *[folder] * (2 if command == "compare-weights" else 1))
    assert code == cli.USER_ERROR
    expected = (
        f"dapo-megatron: {command}: {folder}/config.json does not exist: it says of which model a checkpoint is\n"
    )
    assert error == expected


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron checkpoint with a tokenizer. Not to be changed."""
    folder = tmp_path_factory.mktemp("quantise")
    model = write_model(folder / "hf", **WIDE)
    write_prompts(folder / "prompts.txt")
    assert cli.main(["convert", "--hf", str(model), "--out", str(folder / "megatron")]) == 0
    return folder / "megatron"


def test_quantised_from_a_megatron_checkpoint(
    megatron: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beside OUT stays, the report names the user's folder, and what was written can be inspected."""
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out"
    for name in ("out.exported", "out.incomplete"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text(name)
    before = files_of(tmp_path)
    calls: list[int] = []
    count_calls(monkeypatch, calls)
    prompts = megatron.with_name("prompts.txt")
    options = ("--out", out, "--prompts", prompts, "--format", "fp8_channel")
    assert run("quantize", "--model", megatron, *options)[0] == 0
    assert len(calls) <= 8
    assert json.loads((out / "report.json").read_text())["model"] == str(megatron)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.exported", "out.incomplete"}
    assert {name: digest for name, digest in files_of(tmp_path).items() if not name.startswith("out/")} == before
    assert out.stat().st_mode == (tmp_path / "out.incomplete").stat().st_mode
    code, printed, _ = run("inspect", out)
    assert code == 0
    for line in (
        "model             LlamaForCausalLM: 2 layers of 256, vocabulary 34, untied",
        "quantised         FP8_PER_CHANNEL_PER_TOKEN",
        "format            Hugging Face (safetensors)",
    ):
        assert line in printed.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", "model.layers.9"), "--keep model.layers.9 is no layer of this model"),
        (("--prompts", "nowhere.txt"), "the prompts nowhere.txt do not exist"),
    ],
)
def test_options_are_checked_before_the_export(
    options: tuple[str, ...], message: str, megatron: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: Any) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr("dapo_megatron.checkpoint.quantize.megatron_to_hf", export)
    given = ("--out", tmp_path / "out", "--prompts", megatron.with_name("prompts.txt"), *options)
    code, _, error = run("quantize", "--model", megatron, *given)
    assert code == cli.USER_ERROR
    assert message in error
    assert not list(tmp_path.iterdir())


def test_messages_name_the_folder_of_the_user(
    megatron: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the export between, which is gone when they are read."""

    def differs(exported: HFReader, original: HFReader, *_: Any) -> None:
        raise UserError(f"another x than {original.folder}")

    monkeypatch.setattr("dapo_megatron.checkpoint.quantize.read_back", differs)
    options = ("--out", tmp_path / "out", "--prompts", megatron.with_name("prompts.txt"), "--format", "fp8_channel")
    assert run("quantize", "--model", megatron, *options)[2] == f"dapo-megatron: another x than {megatron}\n"
    assert not list(tmp_path.iterdir())


def test_error_of_many_processes_is_said_once(tmp_path: Path) -> None:
    """Under torchrun the first of a machine says it, and ends the others."""
    torchrun = [sys.executable, "-m", "dapo_megatron.launcher", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "dapo_megatron.cli", "serve", str(tmp_path / "nowhere.yaml")]
    found = subprocess.run(
        [*torchrun, *command], cwd=REPOSITORY, timeout=60, check=False, capture_output=True, text=True
    )
    assert found.returncode == cli.USER_ERROR
    assert found.stderr.count("nowhere.yaml") == 1


def test_error_of_one_process_is_said(run: Run, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, when no other has."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cli, "ECHO_SECONDS", 0.3)
    started = time.monotonic()
    code, _, error = run("inspect", tmp_path)
    assert code == cli.USER_ERROR
    assert "config.json does not exist" in error
    assert time.monotonic() - started > 0.3
