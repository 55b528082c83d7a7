"""The command line up to the point where it becomes the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_helpers import write_config, write_model

from dapo_megatron import cli
from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return write_config(tmp_path)


def test_dry_run_prints_the_resolved_config_and_the_plan(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(config_file), "run.steps=3", "--nproc", "2", "training.mini_batch=4", "--dry-run"]
    assert cli.main(arguments) == 0
    resolved, _, plan = capsys.readouterr().out.partition("\n\n")
    config = Config.model_validate(yaml.safe_load(resolved))
    assert config == load_config(config_file, ["run.steps=3", "training.mini_batch=4"])
    assert "4 mini-batches of 4 responses" in plan
    assert not Path(config.run.dir).exists()


def test_plan_in_numbers(config_file: Path) -> None:
    overrides = ["parallel.tensor=3", "parallel.pipeline=2", "rollout.max_rounds=5", "training.mini_batch=4"]
    plan = cli.plan(load_config(config_file, overrides), 12)
    assert plan["ranks"] == "12 = tensor 3 x pipeline 2 x data 2"
    assert plan["responses per step"] == "16 = 4 groups x 4 answers"
    assert plan["prompts drawn per step"] == "4, dynamic sampling at most 20"
    assert plan["updates in all"] == "16 in 4 steps"
    assert plan["longest sequence"] == "136 tokens; 3 of them fill a micro-batch"


def test_user_error_is_one_sentence_and_exit_code_2(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(config_file), "--nproc=2", "parallel.tensor=2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dapo-megatron: parallel.tensor=2 does not divide 9 attention heads")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--nproc", "0"], ["--no-such-option"]])
def test_wrong_options_exit_with_2(config_file: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(config_file), *arguments])
    assert caught.value.code == 2


def test_interrupt_during_the_checks_exits_with_130(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config, num_ranks: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "preflight", interrupted)
    assert cli.main(["train", str(config_file)]) == 130


def test_becomes_the_launcher(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []

    def execute(path: str, command: list[str]) -> None:
        executed.append([path, *command])
        raise KeyboardInterrupt  # execv does not return either

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cli.main(["train", str(config_file), "run.steps=3", "--nproc", "2"])
    (command,) = executed
    assert command[:2] == [sys.executable, sys.executable]
    assert command[2:] == [
        *["-m", "dapo_megatron.launcher", "--standalone", "--nproc-per-node=2"],
        *["-m", "dapo_megatron.train", str(config_file), "run.steps=3"],
    ]


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "dapo_megatron.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("dapo-megatron 0.")
