"""Draw runs side by side from their metrics.jsonl, finished or not: what the accuracy cost, and how the policy changed.

    python tools/plot_run.py runs/dapo runs/grpo --out compare.png

Accuracy of training (lines) and of evaluations (points with their intervals) stands against optimizer updates,
generated tokens and operations; the rest against steps. What a run did not record is left out, which the tool says.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dapo_megatron.monitoring.metrics import METRICS_FILE, TOTALS, Record, number, read_metrics

# Key of a running total, or of a step's metric, and the label of its axis.
COSTS = {
    "total/updates": "optimizer updates",
    "total/generated_tokens": "generated tokens",
    "total/flops": "FLOPs of generation and training",
}
TRENDS = {
    "entropy": "entropy [nats]",
    "clip_high_probability": "mean probability of up-clipped tokens",
    "response_length": "response length [tokens]",
}
FORMATS = (".png", ".svg")
Point = tuple[float, float, Record]  # x, y and the record that they are of


@dataclass(frozen=True)
class Run:
    """A run's folder, as it was given, and its records, oldest first.

    A step's answers come from the weights that the steps before it made, so `starts` holds each step's record with the
    totals of the one before; `steps` and `evaluations` are as they were written.
    """

    name: str
    starts: Sequence[Record]
    steps: Sequence[Record]
    evaluations: Sequence[Record]


def load_run(run_dir: Path) -> Run:
    """Read a run's metrics.jsonl.

    Raises:
        SystemExit: if it is missing or empty.
    """
    records = list(read_metrics(run_dir))
    if not records:
        raise SystemExit(f"plot_run: {run_dir / METRICS_FILE} is missing or empty; give the folder of a run")
    steps = [record for record in records if "evaluation" not in record]
    before: list[Record] = [{}, *steps]
    starts = [
        step | {key: number(previous, key) for key in TOTALS} for previous, step in zip(before, steps, strict=False)
    ]
    return Run(str(run_dir), starts, steps, [record for record in records if "evaluation" in record])


def points(records: Iterable[Record], x: str, y: str) -> list[Point]:
    """The records that hold both keys as numbers."""
    return [
        (float(record[x]), float(record[y]), record)
        for record in records
        if _is_number(record.get(x)) and _is_number(record.get(y))
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def draw_accuracy(axes: Axes, run: Run, color: str, cost: str) -> bool:
    """Accuracy against a total. False where there is none or the total was not counted."""
    if not any(number(record, cost) for record in [*run.steps, *run.evaluations]):
        return False
    training, evaluations = points(run.starts, cost, "accuracy"), points(run.evaluations, cost, "accuracy")
    draw_line(axes, training, color=color, alpha=0.6, label=run.name)
    low = [max(0.0, y - record["interval"][0]) for _, y, record in evaluations]
    high = [max(0.0, record["interval"][1] - y) for _, y, record in evaluations]
    axes.errorbar(
        [x for x, _, _ in evaluations],
        [y for _, y, _ in evaluations],
        yerr=(low, high),
        fmt="o",
        color=color,
        capsize=3,
        label=f"{run.name}, evaluation" if evaluations else None,
    )
    return bool(training or evaluations)


def draw_trend(axes: Axes, run: Run, color: str, key: str) -> bool:
    """A metric against steps. False where no step has it."""
    found = points(run.steps, "step", key)
    draw_line(axes, found, color=color, label=run.name)
    return bool(found)


def draw_line(axes: Axes, found: Sequence[Point], **style: Any) -> None:
    """A line through points; none, and no entry in the legend, where there is no point."""
    if found:
        axes.plot([x for x, _, _ in found], [y for _, y, _ in found], **style)


def fill_panel(axes: Axes, runs: Sequence[Run], draw: Callable[[Axes, Run, str, str], bool], key: str) -> None:
    """Draw every run that recorded `key`, and name those that did not."""
    missing = [run.name for i, run in enumerate(runs) if not draw(axes, run, f"C{i}", key)]
    axes.grid(alpha=0.3)
    for name in missing:
        print(f"plot_run: {name} did not record {key}", file=sys.stderr)
    if missing:
        axes.set_title(f"not recorded: {', '.join(missing)}", fontsize="small")
    if len(missing) < len(runs):
        axes.legend(fontsize="x-small")


def draw(runs: Sequence[Run]) -> Figure:
    """Three panels of accuracy above three of the policy."""
    figure = Figure(figsize=(15, 8), layout="constrained")
    above, below = figure.subplots(2, 3)
    for axes, (key, label) in zip(above, COSTS.items(), strict=True):
        fill_panel(axes, runs, draw_accuracy, key)
        axes.set(xlabel=label, ylabel="accuracy")
    for axes, (key, label) in zip(below, TRENDS.items(), strict=True):
        fill_panel(axes, runs, draw_trend, key)
        axes.set(xlabel="step", ylabel=label)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the runs and write the picture."""
    parser = argparse.ArgumentParser(description="Draw runs from their metrics.jsonl.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run (run.dir)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="picture to write, .png or .svg")
    options = parser.parse_args(arguments)
    if options.out.suffix not in FORMATS:
        parser.error(f"--out must end in {' or '.join(FORMATS)}, not {options.out.name}")
    draw([load_run(run_dir) for run_dir in options.runs]).savefig(options.out, dpi=120)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
