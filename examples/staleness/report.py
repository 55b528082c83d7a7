"""Whether what is trained on older weights' answers is as good as the synchronous run: non-inferiority over seeds.

Pairs of runs share their seed, and with it the prompts in their order. The difference of their accuracies has a mean
and a standard error over seeds; its one-sided confidence bounds are Student's t.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from scipy.special import stdtrit

from dapo_megatron.monitoring.metrics import number, read_metrics
from examples.ablation.report import Plan, read_run
from examples.ablation.run import Job

MARGIN = 0.08
CONFIDENCE = 0.95
Verdict = Literal["non-inferior", "inferior", "inconclusive"]

# Metric of a step: heading of its column, format, and how it is summed up over a run's steps.
METRICS: dict[str, tuple[str, str, Callable[[Sequence[float]], Any]]] = {
    "staleness": ("staleness, mean", ".2f", np.mean),
    "staleness_max": ("largest", ".0f", np.max),
    "off_policy_tokens": ("tokens of older weights", ".0%", np.mean),
    "rollout_weight": ("importance weight, mean", ".3f", np.mean),
    "rollout_truncated": ("truncated", ".1%", np.mean),
}


@dataclass(frozen=True)
class Finished:
    """One run: held-out accuracy after training, seconds of training, and the METRICS."""

    seed: int
    accuracy: float
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """An arm beside the reference, over the `seeds` that both have run.

    `difference` is the mean of accuracy minus the reference's; `lower` and `upper` are its one-sided bounds, NaN for a
    single seed.
    """

    seeds: int
    difference: float
    lower: float
    upper: float
    verdict: Verdict


def compare(differences: Sequence[float], margin: float = MARGIN) -> Comparison:
    """The verdict of paired differences: non-inferior where the lower bound is above -margin, inferior where the upper
    one is below it, else inconclusive. Raises ValueError without any.
    """
    if not differences:
        raise ValueError("no seed was run by both arms")
    count, mean = len(differences), float(np.mean(differences))
    if count == 1:
        return Comparison(1, mean, math.nan, math.nan, "inconclusive")
    half = float(stdtrit(count - 1, CONFIDENCE) * np.std(differences, ddof=1) / math.sqrt(count))
    lower, upper = mean - half, mean + half
    verdict: Verdict = "non-inferior" if lower > -margin else "inferior" if upper < -margin else "inconclusive"
    return Comparison(count, mean, lower, upper, verdict)


def read_finished(job: Job) -> Finished:
    """What a finished run achieved. A metric that no step has is NaN."""
    run = read_run(job.folder, job.arm, job.seed)
    steps = [record for record in read_metrics(job.folder) if "evaluation" not in record]
    found = {}
    for name, (_, _, summed) in METRICS.items():
        values = [number(record, name) for record in steps if record.get(name) is not None]
        found[name] = float(summed(values)) if values else math.nan
    return Finished(job.seed, run.figures["accuracy"], run.figures["seconds"], found)


def write(plan: Plan, jobs: Sequence[Job], folder: Path) -> list[Path]:
    """Write staleness.md and staleness.json; returns their paths."""
    ((_, arms),) = plan.tables.items()
    runs = {arm: [read_finished(job) for job in jobs if job.arm == arm and job.finished] for arm in arms}
    reference, compared = arms[0], {}
    for arm in arms[1:]:
        base = {run.seed: run.accuracy for run in runs[reference]}
        differences = [run.accuracy - base[run.seed] for run in runs[arm] if run.seed in base]
        if differences:
            compared[arm] = compare(differences)
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / "staleness.md", folder / "staleness.json"
    text.write_text(markdown(plan, runs, compared))
    values = {
        "margin": MARGIN,
        "confidence": CONFIDENCE,
        "arms": {arm: {"overrides": list(plan.arms[arm]), "runs": list(map(asdict, runs[arm]))} for arm in arms},
        "compared": {arm: asdict(comparison) for arm, comparison in compared.items()},
    }
    data.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return [text, data]


HEADER = """# Answers of older weights: what they cost

`make staleness` trains the tiny model of [examples/ablation](../examples/ablation/README.md) on running totals, with
answers of the step's own weights (`{reference}`) and with older ones, against a real vLLM server. An arm is
**non-inferior** where the one-sided {confidence:.0%} bound of its accuracy minus that of `{reference}`, paired by seed,
is above -{margin}; **inferior** where the whole interval is below; else the runs do not tell. Written by
`examples/staleness/report.py`; the runs' own figures are in [staleness.json](staleness.json).

"""


def markdown(
    plan: Plan, runs: Mapping[str, Sequence[Finished]], compared: Mapping[str, Comparison], margin: float = MARGIN
) -> str:
    """The page: a table of verdicts, one of the metrics, and what each arm sets."""
    reference = next(iter(runs))
    verdicts = [("arm", "seeds", "accuracy", f"beyond `{reference}`", "lower bound", "verdict", "seconds")]
    metrics = [("arm", *(heading for heading, _, _ in METRICS.values()))]
    for arm, done in runs.items():
        if not done:
            continue
        accuracy, seconds = (float(np.mean([getattr(run, key) for run in done])) for key in ("accuracy", "seconds"))
        beside = compared.get(arm)
        told = ("", "", "")
        if beside:
            lower = "-" if math.isnan(beside.lower) else f"{beside.lower:+.3f}"
            told = (f"{beside.difference:+.3f}", lower, beside.verdict)
        verdicts.append((f"`{arm}`", str(len(done)), f"{accuracy:.3f}", *told, f"{seconds:.0f}"))
        means = {key: float(np.mean([run.metrics[key] for run in done])) for key in METRICS}
        means["staleness_max"] = max(run.metrics["staleness_max"] for run in done)
        metrics.append((f"`{arm}`", *(format(means[key], form) for key, (_, form, _) in METRICS.items())))
    settings = [("arm", "overrides"), *((f"`{arm}`", f"`{' '.join(plan.arms[arm])}`") for arm in runs)]
    head = HEADER.format(reference=reference, confidence=CONFIDENCE, margin=margin)
    return head + "\n\n".join(_table(rows) for rows in (verdicts, metrics, settings)) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])
