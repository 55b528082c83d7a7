"""The one object through which the training loop tells what it does."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console

from dapo_megatron.config.run import Config
from dapo_megatron.monitoring.console import LiveConsole, PlainConsole, open_console
from dapo_megatron.monitoring.memory import MemorySampler, launcher_pid
from dapo_megatron.monitoring.metrics import MetricsWriter, Record, running_totals, write_evaluation
from dapo_megatron.monitoring.trackers import WandbTracker


class Sink(Protocol):
    """Takes the records of a run."""

    def step(self, record: Record) -> None:
        """A finished training step."""

    def evaluation(self, record: Record) -> None:
        """A finished evaluation."""

    def close(self) -> None:
        """The run ends."""


class Monitor:
    """Console, metrics.jsonl, trackers and memory behind one interface.

    Args:
        config: the run's configuration.
        run_dir: folder of the run.
        enabled: True on rank 0. Elsewhere every method does nothing.
        start_step: steps finished before this process started, when a run is resumed.
    """

    def __init__(self, config: Config, run_dir: str | Path, enabled: bool, start_step: int = 0) -> None:
        self._config, self._run_dir, self._enabled = config, Path(run_dir), enabled
        self._step = start_step
        self._phases: dict[str, float] = {}
        self._step_started: float | None = None
        self._sinks: list[Sink] = []
        if not enabled:
            return
        self._memory = MemorySampler(launcher_pid())
        metrics = MetricsWriter(self._run_dir, start_step)
        self._totals = running_totals(metrics.last, {})
        self._sinks.append(metrics)
        if config.tracking.wandb_project is not None:
            self._sinks.append(WandbTracker(config, self._run_dir))
        self._console: PlainConsole | LiveConsole = open_console(config.tracking.console)
        self._sinks.append(self._console)
        for text in config.notes:
            self.note(f"note: {text}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of a step. Its seconds appear as `seconds/<name>`; several times the same name add up.

        The first phase after a step or an evaluation starts the clock of the next step.
        """
        started = time.monotonic()
        if self._step_started is None:
            self._step_started = started
        if self._enabled:
            self._console.phase(name)
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.monotonic() - started
            if self._enabled:
                self._console.phase(None)

    def progress(self, kind: str, done: float, total: float, text: str = "") -> None:
        """Show that `done` of `total` units of `kind` (a phase's name, such as "rollout") are finished."""
        if self._enabled:
            self._console.progress(kind, done, total, text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step; `step` counts finished steps, so the first is 1.

        Added to `metrics`: `seconds/<phase>`, `seconds/step` (wall clock since the first phase of the step),
        `tokens_per_second` (generated tokens per second of the step), `memory/now_gb` and `memory/peak_gb`
        (all processes of the run on this machine, GB), `steps` and `time` (Unix time). `total/updates`,
        `total/generated_tokens` and `total/flops` sum `updates`, `generated_tokens`, and `flops/generated` with
        `flops/trained`, over all steps since the run's first; steps that a crash undid and evaluations count nothing.
        """
        now = time.monotonic()
        seconds = now - (self._step_started if self._step_started is not None else now)
        record: Record = {"step": step, "steps": self._config.run.steps, **metrics}
        record |= {f"seconds/{name}": value for name, value in self._phases.items()} | {"seconds/step": seconds}
        if "generated_tokens" in metrics and seconds > 0:
            record["tokens_per_second"] = metrics["generated_tokens"] / seconds
        self._step = step
        self._start_over()
        if not self._enabled:
            return
        self._totals = running_totals(self._totals, metrics)
        record = self._stamped(record)
        for sink in self._sinks:
            sink.step(record)

    def evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        """Record an evaluation, usually `before`, `after` or `step_<n>`.

        Args:
            name: also the name of the file in `run_dir`/evaluations that keeps the full result.
            result: `scores` holds the mean score in [0, 1] of every problem; the rest is kept as it is.
        """
        self._start_over()
        if not self._enabled:
            return
        from dapo_megatron.evaluation.statistics import accuracy_interval  # scipy: slow to load, only needed here

        write_evaluation(self._run_dir, name, result)
        scores = [float(score) for score in result["scores"]]
        interval = accuracy_interval(scores, self._config.evaluation.confidence)
        record = self._stamped(
            {
                "step": self._step,
                "evaluation": name,
                "accuracy": sum(scores) / len(scores),
                "interval": list(interval),
                "problems": len(scores),
            }
        )
        for sink in self._sinks:
            sink.evaluation(record)

    def note(self, text: str) -> None:
        """Tell the user something that is no number."""
        if self._enabled:
            self._console.note(text)

    def summary(self) -> None:
        """Write summary.json and print it. Call it once, after the last evaluation; it closes the live view."""
        if not self._enabled:
            return
        from dapo_megatron.monitoring.summary import print_summary, write_summary  # scipy as well

        summary = write_summary(self._run_dir, self._config.evaluation.confidence, self._memory.peak_gb)
        self._console.close()
        print_summary(summary, Console())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close everything; the terminal is usable again. Safe to call twice."""
        if not self._enabled:
            return
        self._enabled = False
        self._memory.close()
        for sink in reversed(self._sinks):
            sink.close()

    def _start_over(self) -> None:
        self._phases, self._step_started = {}, None

    def _stamped(self, record: Record) -> Record:
        """`record` with totals, memory and time."""
        now, peak = round(self._memory.current_gb, 3), round(self._memory.peak_gb, 3)
        return record | self._totals | {"memory/now_gb": now, "memory/peak_gb": peak, "time": time.time()}
