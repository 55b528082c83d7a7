"""`verify layout` on the command line's side: which layout against which reference, and the verdict."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_helpers import QWEN3_MOE, write_model
from rich.console import Console

from dapo_megatron import cli, verify
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.verify import Case, Machine, choose_reference, judge, layout_case

ROOMY = Machine(gpus=0, memory=1 << 40)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Llama with 9 heads, 3 KV heads and 6 layers."""
    return write_model(tmp_path / "model")


def case_of(model: Path, *arguments: str) -> Case:
    options = cli._parse(["verify", "layout", "--model", str(model), *arguments])
    return layout_case(options, architecture_of(model))


def test_options_become_the_configuration(model: Path) -> None:
    case = case_of(
        model,
        *("--tp", "3", "--sp", "--pp", "2", "--vpp", "3", "--cp", "2", "--dp", "5"),
        *("--micro-batch-tokens", "240", "--recompute", "full", "--loss", "gspo", "--aggregation", "sequence_mean"),
    )
    config = case.config
    assert (case.ranks, case.name) == (60, "TP3 PP2 VPP3 CP2 DP5 SP")
    assert config.parallel == ParallelConfig(tensor=3, sequence=True, pipeline=2, virtual_pipeline=3, context=2)
    assert (config.training.micro_batch_tokens, config.training.recompute) == (240, "full")
    assert (config.training.precision, config.training.layer_backend) == ("fp32", "local")  # computed in fp64
    assert (config.algorithm.loss, config.algorithm.aggregation) == ("gspo", "sequence_mean")
    assert config.algorithm.clip.high == 0.07
    assert config.rollout.prompts_per_step == 5  # no data rank without responses


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_every_loss_can_be_verified(model: Path, loss: str) -> None:
    assert case_of(model, "--loss", loss).config.algorithm.loss == loss


def test_defaults(model: Path) -> None:
    case = case_of(model, "--precision", "bf16")
    assert (case.ranks, case.name, case.config.parallel) == (1, "1 rank", ParallelConfig())
    assert (case.config.training.precision, case.config.training.layer_backend) == ("bf16", "auto")
    assert case.config.training.micro_batch_tokens == 96
    assert case_of(model, "--cp", "5").config.training.micro_batch_tokens == 100  # two chunks for each of five ranks


def test_ranks_are_as_few_as_both_grids_allow(tmp_path: Path) -> None:
    """2 x 2 dense ranks a stage would do, but 8 experts' owners are needed."""
    model = write_model(tmp_path / "moe", **QWEN3_MOE)
    assert case_of(model, "--tp", "2", "--sp", "--ep", "8", "--pp", "2").ranks == 16
    with pytest.raises(UserError, match=r"--dp 2: the number of ranks 8 is not a multiple of .* = 2 x 8 x 1 = 16"):
        case_of(model, "--tp", "2", "--sp", "--ep", "8", "--pp", "2", "--dp", "2")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--tp", "2"], "parallel.tensor=2 does not divide 9 attention heads and 3 key/value heads of model; use 1 or"),
        (["--pp", "4"], "parallel.pipeline=4 does not divide 6 layers of model"),
        (["--vpp", "2"], "parallel.virtual_pipeline=2 needs parallel.pipeline > 1"),
        (["--ep", "2"], "parallel.expert=2 needs a model with experts"),
        (["--sp"], "parallel.sequence=true needs parallel.tensor > 1"),
        (["--micro-batch-tokens", "35"], "training.micro_batch_tokens (35) must hold the longest sequence"),
        (["--micro-batch-tokens", "90", "--cp", "2"], "training.micro_batch_tokens (90) must be a multiple of 4"),
    ],
)
def test_an_illegal_layout_starts_nothing(
    model: Path,
    arguments: list[str],
    rule: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert cli.main(["verify", "layout", "--model", str(model), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"dapo-megatron: {rule}")
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["--tp", "0"], ["--loss", "ppo"], ["stray"], ["--no-such-option"]])
def test_wrong_options_exit_with_2(model: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", "layout", "--model", str(model), *arguments])
    assert caught.value.code == 2


def needed(model: Path, stages: int, gpus: int) -> int:
    return Machine(gpus, 0).needed(architecture_of(model), ParallelConfig(pipeline=stages), stages)


def test_the_reference_is_one_rank_with_one_micro_batch(model: Path) -> None:
    case = case_of(model, "--pp", "2", "--dp", "2", "--recompute", "full", "--loss", "gspo")
    config, ranks = choose_reference(ROOMY, architecture_of(model), case.config)
    assert (ranks, config.parallel) == (1, ParallelConfig())
    assert config.training.micro_batch_tokens > 16 * 36
    assert config.training.recompute == "none"
    assert config.algorithm == case.config.algorithm
    assert config.rollout == case.config.rollout


def test_the_reference_has_the_fewest_pipeline_stages_that_fit_on_gpus(tmp_path: Path) -> None:
    """Of 1, 2, 3 and 6 stages."""
    model = write_model(tmp_path / "wide", hidden_size=4500, intermediate_size=9000)
    architecture, config = architecture_of(model), case_of(tmp_path / "wide", "--tp", "3").config
    assert needed(model, 1, 8) > needed(model, 2, 8) > needed(model, 3, 8) > needed(model, 6, 8)
    machine = Machine(gpus=8, memory=needed(model, 3, 8))
    chosen, ranks = choose_reference(machine, architecture, config)
    assert (ranks, chosen.parallel) == (3, ParallelConfig(pipeline=3))
    with pytest.raises(UserError, match="no reference fits"):
        choose_reference(Machine(gpus=2, memory=machine.memory), architecture, config)


def test_ranks_without_gpus_share_one_memory(model: Path) -> None:
    architecture, config = architecture_of(model), case_of(model, "--pp", "2").config
    assert needed(model, 2, gpus=0) > needed(model, 1, gpus=0)
    with pytest.raises(UserError, match=r"no reference fits: one rank needs about 1\.8 GB, 1\.0 GB are there"):
        choose_reference(Machine(gpus=0, memory=10**9), architecture, config)


def test_a_layout_beyond_the_machine_is_refused(model: Path) -> None:
    architecture, case = architecture_of(model), case_of(model, "--tp", "3", "--pp", "2")
    verify.check_machine(ROOMY, architecture, case)
    with pytest.raises(UserError, match="TP3 PP2 needs 6 ranks, each with its GPU; this machine has 4"):
        verify.check_machine(Machine(gpus=4, memory=1 << 40), architecture, case)
    with pytest.raises(UserError, match=r"TP3 PP2 needs about 10.8 GB, this machine has free 2.0 GB; use fewer ranks"):
        verify.check_machine(Machine(gpus=0, memory=2 * 10**9), architecture, case)


def outcome(loss: float = -0.5, **errors: float) -> dict[str, Any]:
    found = {"log_probs/0": 1e-9, "grad/a.weight": 2e-9, "grad/b.weight": 1e-9}
    return {"metrics": {"loss": loss}, "errors": found | {name.replace("__", "/"): e for name, e in errors.items()}}


@pytest.mark.parametrize(
    ("layout", "passed"),
    [
        (outcome(), True),
        (outcome(loss=-0.5 * (1 + 9e-6)), True),
        (outcome(loss=-0.5 * (1 + 2e-5)), False),
        (outcome(grad__b=9e-6), True),
        (outcome(grad__b=2e-5), False),
        (outcome(grad__b=math.inf), False),
        (outcome(log_probs__1=2e-5), False),
    ],
)
def test_verdict(layout: dict[str, Any], passed: bool) -> None:
    assert judge(outcome(), layout, 1e-5).passed is passed


def run_with_fake_ranks(model: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], code: int = 0) -> int:
    """The whole command with a free machine; ranks write `layout`, or only end with a code."""

    def run(command: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "dapo_megatron.launcher"]
        job = json.loads(Path(command[-1]).read_text())
        ranks.append(command[4])
        if not code:
            Path(job["result"]).write_text(json.dumps(outcome() if job["is_reference"] else layout))
        return subprocess.CompletedProcess(command, code)

    ranks: list[str] = []
    monkeypatch.setattr(Machine, "here", lambda: ROOMY)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own handlers
    exit_code = cli.main(["verify", "layout", "--model", str(model), "--tp", "3"])
    assert ranks == ["--nproc-per-node=1", "--nproc-per-node=3"][: len(ranks)]
    return exit_code


def test_both_sides_run_and_the_worst_gradient_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with_fake_ranks(model, monkeypatch, outcome()) == 0
    assert "pass: no difference is above 1e-05; the largest of a gradient is in a.weight" in capsys.readouterr().out
    assert run_with_fake_ranks(model, monkeypatch, outcome(grad__c=3e-3)) == 1
    printed = capsys.readouterr().out
    assert "FAIL: 1 of 3 gradients differ by more than 1e-05, most: c" in printed
    assert "3.0e-03" in printed


def test_a_failed_rank_gives_its_exit_code(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with_fake_ranks(model, monkeypatch, outcome(), code=137) == 137


def test_the_table_shows_both_losses(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = case_of(model, "--tp", "3")
    reference = Case(*choose_reference(ROOMY, architecture_of(model), case.config))
    Console(width=100).print(verify.table(reference, case, judge(outcome(-0.25), outcome(-0.26), 1e-5)))
    printed = capsys.readouterr().out
    assert [text in printed for text in ("reference: 1 rank", "TP3", "-0.250000000", "-0.260000000", "1.0e-02")]
    assert "gradients, worst of 2" in printed
