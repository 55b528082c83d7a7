"""What a run leaves behind and shows: metrics.jsonl, console, memory, summary."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from config_helpers import write_config
from rich.console import Console

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.monitoring import console as console_module
from dapo_megatron.monitoring import trackers
from dapo_megatron.monitoring.console import LiveConsole, PlainConsole, open_console
from dapo_megatron.monitoring.memory import MemorySampler, tree_memory_gb
from dapo_megatron.monitoring.metrics import MetricsWriter, read_metrics
from dapo_megatron.monitoring.monitor import Monitor
from dapo_megatron.monitoring.summary import print_summary, write_summary
from dapo_megatron.monitoring.trackers import WandbTracker

METRICS = {
    "drawn": 32,
    "kept": 16,
    "accuracy": 0.41,
    "reward": -0.18,
    "response_length": 4.2,
    "generated_tokens": 1024,
    "updates": 2,
    "flops/generated": 3e15,
    "flops/trained": 4e15,
    "tokens/kept": 600,
    "tokens/all_right": 100,
    "tokens/all_wrong": 180,
    "tokens/failed": 20,
    "tokens/surplus": 70,
    "tokens/aborted": 30,
    "entropy": 0.61,
    "clip_low": 0.002,
    "clip_high": 0.01,
    "grad_norm": 1.2,
    "lr": 1e-5,
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_config(tmp_path), ["tracking.console=plain"])


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), width=160, force_terminal=True)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record(**values: Any) -> dict[str, Any]:
    stamp = {"step": 3, "steps": 20, "seconds/step": 9.1, "memory/peak_gb": 6.94, "tokens_per_second": 812.0}
    return METRICS | stamp | {"seconds/rollout": 3.1, "seconds/update": 4.0} | values


def test_metrics_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run")
    writer.step({"step": 1, "loss": float("nan"), "norm": float("inf"), "count": np.int64(3), "mean": np.float32(0.5)})
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "norm": None, "count": 3, "mean": 0.5}
    writer.close()


def test_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert list(read_metrics(tmp_path)) == [{"step": 1}]


def test_steps_that_are_done_again_are_not_counted_twice(tmp_path: Path) -> None:
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        writer = MetricsWriter(tmp_path, start_step=start)
        for step in steps:
            writer.step({"step": step, "start": start})
        writer.close()
    assert [(entry["step"], entry["start"]) for entry in read_metrics(tmp_path)] == [(1, 0), (2, 0), (3, 2), (4, 2)]


def test_new_run_in_an_old_folder_starts_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsWriter(tmp_path).close()
    assert list(read_metrics(tmp_path)) == []


def test_plain_console_prints_one_line_a_step(terminal: Console) -> None:
    PlainConsole(terminal).step(record())
    assert written(terminal) == (
        "step 3/20 | kept/drawn 16/32 | accuracy 0.410 | reward -0.18 | length 4.2 | entropy 0.610 | "
        "clip low/high 0.0020/0.0100 | grad norm 1.20 | lr 1.0e-05 | s 9.1 | tok/s 812 | GB 6.9 | "
        "rollout 3.1 s, update 4.0 s\n"
    )


def test_age_of_tokens_is_told_where_some_are_of_older_weights(terminal: Console) -> None:
    PlainConsole(terminal).step(record() | {"staleness": 0.62, "staleness_max": 2.0})
    PlainConsole(terminal).step(record() | {"staleness": 0.0, "staleness_max": 0.0})
    first, second = written(terminal).splitlines()
    assert first.endswith("| rollout 3.1 s, update 4.0 s, staleness 0.6/2")
    assert second.endswith("| rollout 3.1 s, update 4.0 s")


def test_notes_about_the_configuration_come_first(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrival = config.model_copy(update={"rollout": config.rollout.model_copy(update={"selection": "arrival"})})
    Monitor(arrival, tmp_path / "run", enabled=True).close()
    assert capsys.readouterr().out.startswith("note: rollout.selection=arrival prefers short answers")


def test_plain_console_survives_missing_metrics(terminal: Console) -> None:
    PlainConsole(terminal).step({"step": 1, "steps": 2, "grad_norm": float("nan")})
    assert "kept/drawn -/- | accuracy - |" in written(terminal)
    assert "grad norm nan" in written(terminal)


def test_plain_console_tells_progress_only_now_and_then(terminal: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainConsole(terminal)
    plain.progress("rollout", 1, 16, "drawn 2")
    assert written(terminal) == ""
    monkeypatch.setattr(console_module, "QUIET_SECONDS", 0.0)
    plain.progress("rollout", 2, 16, "drawn 4")
    assert written(terminal) == "rollout 2/16 drawn 4\n"


def test_live_console_shows_steps_evaluations_and_progress(terminal: Console) -> None:
    live = open_console("auto", terminal)
    assert isinstance(live, LiveConsole)
    evaluation = {"step": 0, "evaluation": "before", "accuracy": 0.15, "interval": [0.12, 0.18], "problems": 512}
    live.evaluation(evaluation)
    for step in range(1, 20):
        live.step(record(step=step))
    live.phase("rollout")
    live.progress("rollout", 5, 16, "drawn 12")
    with terminal.capture() as capture:
        terminal.print(live._render())
    view = capture.get()
    assert "19/20" in view
    assert "1/20 " not in view.split("8/20")[0]
    assert "5/16 drawn 12" in view
    assert "accuracy 0.150 [0.120, 0.180] on 512 problems" in view
    live.phase(None)
    live.close()
    with terminal.capture() as capture:
        terminal.print(live._render())
    assert "5/16" not in capture.get()


def test_console_is_plain_where_there_is_no_terminal() -> None:
    assert isinstance(open_console("auto", Console(file=io.StringIO())), PlainConsole)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A grandchild of this process that holds 200 MB."""
    hold = "import time; block = b'1' * 200_000_000; print('ready', flush=True); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    for descendant in psutil.Process(process.pid).children(recursive=True):
        descendant.kill()
    process.wait(timeout=10)
    process.stdout.close()


def test_memory_of_all_descendants(child: subprocess.Popen[bytes]) -> None:
    assert 0.2 < tree_memory_gb(child.pid) < 0.3


def test_memory_peak_outlives_the_process(child: subprocess.Popen[bytes]) -> None:
    sampler = MemorySampler(child.pid, interval=0.05)
    time.sleep(0.3)
    for descendant in psutil.Process(child.pid).children(recursive=True):
        descendant.kill()
    time.sleep(0.5)
    sampler.close()
    assert sampler.current_gb < 0.2
    assert sampler.peak_gb > 0.2


def test_memory_of_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=30)
    assert tree_memory_gb(process.pid) == 0.0


def run_two_steps(config: Config, run_dir: Path, enabled: bool = True) -> Monitor:
    monitor = Monitor(config, run_dir, enabled)
    monitor.evaluation("before", {"scores": [0.0, 0.0, 1.0, 0.0] * 16})
    for step in (1, 2):
        with monitor.phase("rollout"):
            time.sleep(0.05)
            monitor.progress("rollout", 1, 2, "text")
        for _ in range(2):
            with monitor.phase("update"):
                time.sleep(0.02)
        monitor.step(step, METRICS)
    with monitor.phase("evaluation"):
        time.sleep(0.05)
    monitor.evaluation("after", {"scores": [1.0, 0.0, 1.0, 1.0] * 16, "truncated": 0.0})
    return monitor


def test_monitor_records_steps_phases_and_evaluations(config: Config, tmp_path: Path) -> None:
    run_two_steps(config, tmp_path / "run").close()
    before, first, second, after = read_metrics(tmp_path / "run")
    assert [entry["step"] for entry in (before, first, second, after)] == [0, 1, 2, 2]
    assert before["accuracy"] == 0.25
    assert before["interval"][0] < 0.25 < before["interval"][1]
    assert first.items() >= METRICS.items()
    assert second["seconds/rollout"] >= 0.05
    assert second["seconds/update"] >= 0.04
    assert second["seconds/rollout"] + second["seconds/update"] <= second["seconds/step"]
    assert second["seconds/step"] <= second["time"] - first["time"] + 0.01
    assert second["tokens_per_second"] == pytest.approx(1024 / second["seconds/step"])
    assert second["memory/peak_gb"] > 0
    assert "seconds/evaluation" not in second
    assert (after["evaluation"], after["problems"]) == ("after", 64)


def totals(entry: dict[str, Any]) -> tuple[float, float, float]:
    return entry["total/updates"], entry["total/generated_tokens"], entry["total/flops"]


def test_totals_stand_in_steps_and_evaluations(config: Config, tmp_path: Path) -> None:
    run_two_steps(config, tmp_path / "run").close()
    once, twice = (2, 1024, 7e15), (4, 2048, 14e15)
    assert [totals(entry) for entry in read_metrics(tmp_path / "run")] == [(0, 0, 0), once, twice, twice]


def test_totals_go_on_when_a_run_is_resumed(config: Config, tmp_path: Path) -> None:
    """Step 2 is done again: its first try is not counted."""
    run_two_steps(config, tmp_path / "run").close()
    for start, metrics in ((1, METRICS | {"updates": 5}), (2, METRICS)):
        with Monitor(config, tmp_path / "run", enabled=True, start_step=start) as monitor:
            monitor.evaluation(f"again_{start}", {"scores": [1.0]})
            monitor.step(start + 1, metrics)
    steps = [totals(entry) for entry in read_metrics(tmp_path / "run")]
    once, twice, thrice = (2, 1024, 7e15), (7, 2048, 14e15), (9, 3072, 21e15)
    assert steps == [(0, 0, 0), once, once, twice, twice, thrice]


def test_metrics_that_are_missing_or_no_number_add_nothing(config: Config, tmp_path: Path) -> None:
    with Monitor(config, tmp_path / "run", enabled=True) as monitor:
        monitor.step(1, {"updates": 1.0, "flops/generated": float("nan"), "flops/trained": 3.0})
    with Monitor(config, tmp_path / "run", enabled=True, start_step=1) as monitor:
        monitor.step(2, {})
    first, second = read_metrics(tmp_path / "run")
    assert totals(first) == totals(second) == (1, 0, 3)


def test_monitor_of_other_ranks_does_nothing(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = run_two_steps(config, tmp_path / "run", enabled=False)
    monitor.summary()
    monitor.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_phase_is_timed_and_closed_when_it_fails(config: Config, tmp_path: Path) -> None:
    monitor = Monitor(config, tmp_path / "run", enabled=True)
    with pytest.raises(ValueError, match="broken"), monitor.phase("rollout"):
        raise ValueError("broken")
    monitor.step(1, {})
    monitor.close()
    monitor.close()
    (entry,) = read_metrics(tmp_path / "run")
    assert "seconds/rollout" in entry


def test_summary_has_what_the_run_achieved(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = run_two_steps(config, tmp_path / "run")
    monitor.summary()
    monitor.close()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    seconds = [entry["seconds/step"] for entry in read_metrics(tmp_path / "run") if "evaluation" not in entry]
    assert summary["accuracy_before"] == 0.25
    assert summary["accuracy_after"] == 0.75
    assert summary["gain"] == 0.5
    assert summary["interval_gain"][0] < 0.5 < summary["interval_gain"][1]
    assert summary["interval_after"][0] < 0.75 < summary["interval_after"][1]
    assert (summary["steps"], summary["groups_drawn"], summary["groups_kept"]) == (2, 64, 32)
    assert summary["seconds_training"] == pytest.approx(sum(seconds))
    assert summary["peak_memory_gb"] > 0
    assert (summary["updates"], summary["generated_tokens"], summary["flops"]) == (4, 2048, 14e15)
    assert (summary["kept_tokens"], summary["share_dropped_tokens"]) == (1200, 0.4)
    printed = capsys.readouterr().out
    for text in ("32 kept of 64 drawn", "1.4e+16, generation", "2,048 generated, 1,200 trained on", "40.0% of the tok"):
        assert text in printed


def test_summary_without_evaluations_says_so(tmp_path: Path, terminal: Console) -> None:
    MetricsWriter(tmp_path).close()
    summary = write_summary(tmp_path, confidence=0.95, peak_memory_gb=1.5)
    assert summary["accuracy_before"] is summary["gain"] is summary["interval_after"] is None
    assert summary["kept_tokens"] is summary["share_dropped_tokens"] is None
    assert (summary["updates"], summary["generated_tokens"], summary["flops"]) == (0, 0, 0)
    assert summary["peak_memory_gb"] == 1.5
    print_summary(summary, terminal)
    assert "0 generated " in written(terminal)
    assert "dynamic sampling" not in written(terminal)
    assert written(terminal).count("not measured") == 3


def test_wandb_that_is_configured_but_missing(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking\.wandb_project is set, but wandb is not installed"):
        WandbTracker(config, tmp_path)


def test_wandb_gets_steps_under_their_number(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finished")
    )
    module = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "wandb", module)
    config.tracking.wandb_project, config.tracking.wandb_mode = "dapo", "offline"
    tracker = WandbTracker(config, tmp_path / "run")
    tracker.step({"step": 4, "loss": 0.5})
    tracker.evaluation({"step": 4, "accuracy": 0.75})
    tracker.close()
    options, step, evaluation, finished = calls
    assert (options["project"], options["mode"], options["dir"]) == ("dapo", "offline", str(tmp_path / "run"))
    assert step == ({"step": 4, "loss": 0.5}, 4)
    assert evaluation == ({"evaluation/accuracy": 0.75}, 4)
    assert finished == "finished"
