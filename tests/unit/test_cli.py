"""The command line up to the point where it becomes the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_helpers import write_config, write_model

from dapo_megatron import cli
from dapo_megatron.config import preflight
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.planning.plan import plan, servers
from tests.models import REPOSITORY


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return write_config(tmp_path)


def test_dry_run_prints_the_resolved_config_and_the_plan(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(config_file), "run.steps=3", "--nproc", "2", "training.mini_batch=4", "--dry-run"]
    assert cli.main(arguments) == 0
    resolved, _, planned = capsys.readouterr().out.partition("\n\n")
    config = Config.model_validate(yaml.safe_load(resolved))
    assert config == load_config(config_file, ["run.steps=3", "training.mini_batch=4"])
    assert "4 mini-batches of 4 responses" in planned
    assert "not checked" not in planned
    assert not Path(config.run.dir).exists()


def test_plan_in_numbers(config_file: Path) -> None:
    overrides = ["parallel.tensor=3", "parallel.pipeline=2", "rollout.max_rounds=5", "training.mini_batch=4"]
    in_numbers = plan(load_config(config_file, overrides), 12, 2)
    assert in_numbers["ranks"] == "12 = tensor 3 x context 1 x data 2 x pipeline 2, on 2 nodes"
    assert in_numbers["responses per step"] == "16 = 4 groups x 4 answers"
    assert in_numbers["prompts drawn per step"] == "4, dynamic sampling at most 20"
    assert in_numbers["updates in all"] == "16 in 4 steps"
    assert in_numbers["longest sequence"] == "136 tokens; 3 of them fill a micro-batch"
    assert "reference policy" not in in_numbers
    overrides += ["algorithm.kl.coefficient=0.1", "reference.parallel={context: 4}", "reference.precision=fp32"]
    reference = plan(load_config(config_file, overrides), 12, 2)["reference policy"]
    assert reference.endswith("model, tensor 1 x context 4 x data 3 x pipeline 1, fp32")
    overrides += ["algorithm.overlong.shift=past_max", "algorithm.overlong.cache_tokens=40"]
    assert plan(load_config(config_file, overrides), 12, 2)["longest sequence"].startswith("176 tokens; 2 of them")


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

    monkeypatch.setattr(preflight, "preflight", interrupted)
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


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a dry run prints after the configuration."""
    assert cli.main(["train", *arguments, "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.partition("\n\n")[2]


def test_dry_run_tells_the_place_of_every_rank(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["parallel.tensor=3", "parallel.pipeline=2", "parallel.virtual_pipeline=3"]
    lines = dry_run(capsys, str(config_file), *layout, "--nproc", "6", "--nnodes", "2").splitlines()
    ranks = [
        line.split() for line in lines[lines.index(next(line for line in lines if line.startswith("rank "))) + 1 :]
    ]
    assert [int(rank[0]) for rank in ranks] == list(range(12))
    assert ranks[4] == ["4", "0", "1", "0", "1", "0", "0", ranks[4][7], "0-0", "2-2", "4-4"]
    assert ranks[11] == ["11", "1", "2", "0", "1", "1", "0", ranks[11][7], "1-1", "3-3", "5-5"]


def test_dry_run_of_a_model_that_is_elsewhere(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(config_file), "model.path=nowhere", "--dry-run"]
    assert cli.main(arguments) == 2
    assert "model.path: the folder nowhere does not exist; to plan without it, give --hf-config" in (
        capsys.readouterr().err
    )
    hf_config = tmp_path / "model" / "config.json"
    text = dry_run(capsys, str(config_file), "model.path=nowhere", "--hf-config", str(hf_config))
    assert f"not checked: nowhere is not on this machine (dimensions are those of {hf_config})" in text
    assert cli.main([*arguments, "--hf-config", str(tmp_path / "config.yaml")]) == 2
    assert "--hf-config must be a file config.json, not" in capsys.readouterr().err
    assert cli.main([*arguments, "--hf-config", str(hf_config), "parallel.tensor=2"]) == 2
    assert "parallel.tensor=2 does not divide" in capsys.readouterr().err


def test_dry_run_of_a_reference_that_is_elsewhere(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = [str(config_file), "algorithm.kl.coefficient=0.1", "reference.path=far"]
    assert cli.main(["train", *reference, "--dry-run"]) == 2
    assert "reference.path: the folder far does not exist" in capsys.readouterr().err
    elsewhere = ["model.path=nowhere", "--hf-config", str(tmp_path / "model/config.json")]
    assert "not checked: far is not on this machine: the reference policy" in dry_run(capsys, *reference, *elsewhere)
    overrides = ["reference.path=null", "reference.parallel={tensor: 2}"]
    assert cli.main(["train", *reference, *elsewhere, *overrides, "--nproc", "2", "--dry-run"]) == 2
    assert "reference.parallel.tensor=2 does not divide" in capsys.readouterr().err


def test_many_nodes_are_for_the_launch_script(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(config_file), "--nnodes", "2"]) == 2
    assert "launch/train.sh starts a run of many nodes" in capsys.readouterr().err


def test_servers_in_words(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    external = FleetConfig(mode="external", urls_file=str(file), tensor=2)
    assert servers(FleetConfig(servers=3), 4) == "3 x tensor 1, bfloat16, started by the run"
    assert (
        servers(FleetConfig(mode="colocated", tensor=2), 4) == "2 x tensor 2, bfloat16, on the trainers' GPUs in turns"
    )
    url = "http://10.0.0.7:8000"
    assert servers(FleetConfig(mode="external", urls=[url]), 4) == f"1 x tensor 1, bfloat16, at {url}"
    assert servers(external, 4) == f"tensor 2, bfloat16, at the addresses in {file}"
    file.write_text(f"{url}\nhttp://10.0.0.8:8000\n")
    assert servers(external, 4) == f"2 x tensor 2, bfloat16, at the addresses in {file}"


def test_colocated_fleet_is_planned(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, str(config_file), "fleet.mode=colocated")
    assert "1 x tensor 1, bfloat16, on the trainers' GPUs in turns" in " ".join(text.replace("│", " ").split())


EXAMPLES: dict[str, tuple[str, ...]] = {
    "laptop/addition": (),
    "laptop/dpo": (),
    "qwen2.5_7b_8gpu/bf16": ("--nproc=4",),
    "qwen2.5_7b_8gpu/fp8": ("--nproc=4",),
    "qwen2.5_32b_128gpu/bf16": ("--nproc=8", "--nnodes=8"),
    "qwen2.5_32b_128gpu/fp8": ("--nproc=8", "--nnodes=8"),
}


def test_every_example_is_dry_run_here() -> None:
    """But those whose runs start from a model that is made here (tests/unit/test_ablation.py and its like)."""
    files = [
        path for path in (REPOSITORY / "examples").glob("*/*.yaml") if path.parent.name not in ("ablation", "staleness")
    ]
    assert {str(path.relative_to(REPOSITORY / "examples").with_suffix("")) for path in files} == set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_pass_a_dry_run(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    text = dry_run(capsys, f"examples/{example}.yaml", *EXAMPLES[example], "model.path=models/elsewhere")
    assert "not checked: models/elsewhere is not on this machine" in text


def test_paper_run_fits_128_gpus_that_train_and_generate_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    colocated = ["fleet.mode=colocated", "fleet.urls_file=null"]
    arguments = ["--nproc=8", "--nnodes=16", "model.path=models/elsewhere"]
    text = dry_run(capsys, str(REPOSITORY / "examples/qwen2.5_32b_128gpu/bf16.yaml"), *colocated, *arguments)
    assert "128 = tensor 8 x context 2 x data 4 x pipeline 2" in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("folder", ["qwen2.5_7b_8gpu", "qwen2.5_32b_128gpu"])
def test_fp8_variant_differs_in_the_precision_alone(folder: str) -> None:
    bf16, fp8 = (load_config(REPOSITORY / "examples" / folder / f"{name}.yaml") for name in ("bf16", "fp8"))
    assert fp8.training.precision == "fp8"
    same = [f"run.dir={fp8.run.dir}", "training.precision=fp8"]
    if bf16.fleet.urls_file:
        same.append(f"fleet.urls_file={fp8.fleet.urls_file}")
    assert load_config(REPOSITORY / "examples" / folder / "bf16.yaml", same) == fp8


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "dapo_megatron.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("dapo-megatron 0.")
