"""From the runs of the ablation to tables with confidence intervals and a plot.

The unit is the run: intervals are Student's t over seeds, and what is compared is paired by seed, because runs of one
seed see the same prompts in the same order. They say how sure the figures are on this task, not on others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from scipy.special import stdtrit

from dapo_megatron.monitoring.metrics import EVALUATIONS, read_metrics
from dapo_megatron.monitoring.summary import SUMMARY_FILE

CONFIDENCE = 0.95
LAST = 5  # steps at the end of a run over which its noisy metrics are averaged

# Figure of a run: heading of its column and format.
COLUMNS = {
    "accuracy": ("accuracy", ".3f"),
    "gain": ("gain", "+.3f"),
    "steps": ("steps", ".0f"),
    "kilotokens": ("1,000 tokens generated", ".0f"),
    "seconds": ("seconds of training", ".0f"),
    "entropy": ("entropy at the end", ".3f"),
    "truncated": ("cut off", ".3f"),
    "length": ("tokens an answer", ".2f"),
    "clipped_probability": ("probability of up-clipped tokens", ".3f"),
}
WITH_INTERVAL = ("accuracy", "gain")


@dataclass(frozen=True)
class Run:
    """One finished run.

    `figures` has the keys of COLUMNS; NaN is what was never measured. `curve` is the accuracy of training in each
    step, `tokens` what was generated until its end; both [steps].
    """

    arm: str
    seed: int
    figures: Mapping[str, float]
    curve: Sequence[float]
    tokens: Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its confidence interval, NaN for a single seed."""

    mean: float
    margin: float

    def text(self, form: str) -> str:
        """Such as "+0.120 ± 0.031"; "-" for what was not measured."""
        if math.isnan(self.mean):
            return "-"
        margin = "" if math.isnan(self.margin) else f" ± {format(self.margin, form.removeprefix('+'))}"
        return f"{format(self.mean, form)}{margin}"


@dataclass(frozen=True)
class Plan:
    """What arms.yaml says: overrides of each arm, rows of each table, and the four arms of each square."""

    arms: Mapping[str, Sequence[str]]
    tables: Mapping[str, Sequence[str]]
    squares: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        """Raises ValueError for an arm that is compared but not defined, and for a square without four."""
        for title, names in [*self.tables.items(), *self.squares.items()]:
            if unknown := [name for name in names if name not in self.arms]:
                raise ValueError(f"{title}: {unknown[0]} is not among the arms")
        for title, names in self.squares.items():
            if len(names) != 4:
                raise ValueError(f"squares: {title} must have four arms, not {len(names)}")


def read_run(folder: Path, arm: str, seed: int) -> Run:
    """The figures of a finished run. Accuracy, length and cut-off answers are those of the last evaluation."""
    summary = orjson.loads((folder / SUMMARY_FILE).read_bytes())
    after = orjson.loads((folder / EVALUATIONS / "after.json").read_bytes())
    steps = [record for record in read_metrics(folder) if "evaluation" not in record]
    tokens = np.cumsum([record["generated_tokens"] for record in steps]).tolist()
    figures = {
        "accuracy": summary["accuracy_after"],
        "gain": summary["gain"],
        "steps": summary["steps"],
        "kilotokens": tokens[-1] / 1000,
        "seconds": summary["seconds_training"],
        "entropy": _mean_of_last(steps, "entropy"),
        "truncated": after["truncated"],
        "length": after["response_length"],
        "clipped_probability": _mean_of_last(steps, "clip_high_probability"),
    }
    return Run(arm, seed, figures, [_number(record, "accuracy") for record in steps], tokens)


def _mean_of_last(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    """Mean of the last steps that have a number there: a step without updates has none."""
    values = [value for record in steps if not math.isnan(value := _number(record, key))]
    return sum(values[-LAST:]) / len(values[-LAST:]) if values else math.nan


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    return math.nan if value is None else float(value)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and margin: t(n - 1) x sample standard deviation / sqrt(n). NaNs are left out."""
    known = np.array([value for value in values if not math.isnan(value)])
    if len(known) < 2:
        return Estimate(float(known[0]) if len(known) else math.nan, math.nan)
    quantile = stdtrit(len(known) - 1, (1 + CONFIDENCE) / 2)
    return Estimate(float(known.mean()), float(quantile * known.std(ddof=1) / math.sqrt(len(known))))


class Results:
    """The finished runs of a plan, and what they say."""

    def __init__(self, plan: Plan, runs: Sequence[Run]) -> None:
        self.plan = plan
        self.runs = {
            arm: sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed) for arm in plan.arms
        }

    def figure(self, arm: str, key: str) -> Estimate:
        """A figure of an arm over its seeds."""
        return estimate([run.figures[key] for run in self.runs[arm]])

    def contrast(self, weights: Mapping[str, int]) -> Estimate:
        """Sum of weight x accuracy over arms, for each seed that all of them have run, such as {new: 1, old: -1}."""
        accuracy = {arm: {run.seed: run.figures["accuracy"] for run in self.runs[arm]} for arm in weights}
        seeds = set.intersection(*(set(by_seed) for by_seed in accuracy.values()))
        return estimate([sum(w * accuracy[arm][seed] for arm, w in weights.items()) for seed in sorted(seeds)])

    def steps_of(self, title: str) -> Iterator[tuple[str, Estimate | None]]:
        """Rows of a table that have runs, each with its accuracy beyond the row above (None: the first)."""
        above = None
        for arm in self.plan.tables[title]:
            if self.runs[arm]:
                yield arm, self.contrast({arm: 1, above: -1}) if above is not None else None
                above = arm

    def effects(self, title: str) -> dict[str, Estimate] | None:
        """Of a square: what each change adds alone, both together, and what they add beyond the sum of the two."""
        neither, first, second, both = self.plan.squares[title]
        if not all(self.runs[arm] for arm in (neither, first, second, both)):
            return None
        return {
            "the first alone": self.contrast({first: 1, neither: -1}),
            "the second alone": self.contrast({second: 1, neither: -1}),
            "both": self.contrast({both: 1, neither: -1}),
            "both beyond the sum of the two": self.contrast({both: 1, first: -1, second: -1, neither: 1}),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, for results.json: estimates, comparisons and each run with its curve."""
        return {
            "confidence": CONFIDENCE,
            "arms": {
                arm: {"overrides": list(self.plan.arms[arm])} | {key: self.figure(arm, key) for key in COLUMNS}
                for arm, runs in self.runs.items()
                if runs
            },
            "tables": {title: dict(self.steps_of(title)) for title in self.plan.tables},
            "squares": {title: self.effects(title) for title in self.plan.squares},
            "runs": [run for runs in self.runs.values() for run in runs],
        }

    def markdown(self) -> str:
        """All tables and squares as Markdown; arms without a run are left out."""
        parts = [f"Mean over seeds ± half a {CONFIDENCE:.0%} confidence interval (Student's t; paired by seed where "
                 "runs are compared)."]  # fmt: skip
        parts += [self._table(title) for title in self.plan.tables if any(True for _ in self.steps_of(title))]
        parts += [self._square(title) for title in self.plan.squares if self.effects(title)]
        return "\n\n".join(parts) + "\n"

    def _table(self, title: str) -> str:
        headings = [heading for heading, _ in COLUMNS.values()]
        lines = [f"## {title}\n", _row(["arm", "seeds", headings[0], "beyond the row above", *headings[1:]])]
        lines.append(_row(["---"] * (len(headings) + 3)))
        for arm, step in self.steps_of(title):
            cells = [self._cell(arm, key) for key in COLUMNS]
            beyond = step.text("+.3f") if step else ""
            lines.append(_row([f"`{arm}`", str(len(self.runs[arm])), cells[0], beyond, *cells[1:]]))
        return "\n".join(lines)

    def _cell(self, arm: str, key: str) -> str:
        value = self.figure(arm, key)
        return (value if key in WITH_INTERVAL else Estimate(value.mean, math.nan)).text(COLUMNS[key][1])

    def _square(self, title: str) -> str:
        names = ("neither", "the first", "the second", "both")
        lines = [f"## {title}\n", _row(["changes", "arm", "accuracy"]), _row(["---"] * 3)]
        for name, arm in zip(names, self.plan.squares[title], strict=True):
            lines.append(_row([name, f"`{arm}`", self._cell(arm, "accuracy")]))
        lines += ["", _row(["effect", "accuracy"]), _row(["---"] * 2)]
        lines += [_row([name, effect.text("+.3f")]) for name, effect in (self.effects(title) or {}).items()]
        return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(results: Results, folder: Path) -> list[Path]:
    """Write results.md, results.json and, where an arm has run, results.svg; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, data, plot = (folder / f"results.{ending}" for ending in ("md", "json", "svg"))
    table.write_text(results.markdown())
    data.write_bytes(orjson.dumps(results.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    draw(results, plot)
    return [table, data, plot]


def draw(results: Results, path: Path) -> None:
    """Accuracy of all arms with intervals; training accuracy of the first table's arms by step and by tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    bars, by_step, by_tokens = figure.subplots(1, 3)
    arms = [arm for arm, runs in results.runs.items() if runs]
    estimates = [results.figure(arm, "accuracy") for arm in arms]
    bars.errorbar(
        [e.mean for e in estimates],
        range(len(arms)),
        xerr=[0.0 if math.isnan(e.margin) else e.margin for e in estimates],
        fmt="o",
        capsize=3,
    )
    bars.set_yticks(range(len(arms)), arms)
    bars.invert_yaxis()
    bars.set_xlabel(f"held-out accuracy after training, {CONFIDENCE:.0%} interval")
    for arm in next(iter(results.plan.tables.values())):
        if runs := results.runs[arm]:
            shortest = min(len(run.curve) for run in runs)
            curve = np.mean([run.curve[:shortest] for run in runs], axis=0)
            tokens = np.mean([run.tokens[:shortest] for run in runs], axis=0) / 1000
            by_step.plot(range(1, shortest + 1), curve, label=arm)
            by_tokens.plot(tokens, curve, label=arm)
    by_step.set(xlabel="training step", ylabel="accuracy of all answers drawn, mean over seeds")
    by_tokens.set(xlabel="1,000 tokens generated", ylabel="accuracy of all answers drawn, mean over seeds")
    if by_step.lines:
        by_step.legend()
    figure.savefig(path)
