"""summary.json: what a run achieved and what it took."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_megatron.evaluation.statistics import accuracy_interval, paired_gain_interval
from dapo_megatron.monitoring.metrics import Record, number, read_metrics, read_scores

SUMMARY_FILE = "summary.json"
# Tokens of answers that were generated and not trained on, by what became of their group.
DROPPED_TOKENS = ("tokens/all_right", "tokens/all_wrong", "tokens/failed", "tokens/surplus", "tokens/aborted")


def write_summary(run_dir: Path, confidence: float, peak_memory_gb: float) -> dict[str, Any]:
    """Write `run_dir`/summary.json from metrics.jsonl and the evaluations named `before` and `after`.

    Args:
        run_dir: folder of the run. A resumed run counts as one: its earlier steps are in metrics.jsonl.
        confidence: confidence level of the intervals, such as 0.95.
        peak_memory_gb: largest memory of all processes since the start of this process, in GB (10^9 bytes).

    Returns:
        What was written. Accuracies, intervals and the gain are null where an evaluation is missing, `kept_tokens` and
        `share_dropped_tokens` where no step tells what became of its tokens. `flops` are operations of generation and
        training; those of evaluations are not in any of the sums.
    """
    records = list(read_metrics(run_dir))
    steps = [record for record in records if "evaluation" not in record]
    last = steps[-1] if steps else {}
    before, after = read_scores(run_dir, "before"), read_scores(run_dir, "after")
    summary: dict[str, Any] = {
        "accuracy_before": _mean(before) if before else None,
        "accuracy_after": _mean(after) if after else None,
        "interval_before": accuracy_interval(before, confidence) if before else None,
        "interval_after": accuracy_interval(after, confidence) if after else None,
        "gain": _mean(after) - _mean(before) if before and after else None,
        "interval_gain": paired_gain_interval(before, after, confidence) if before and after else None,
        "steps": len(steps),
        "updates": int(number(last, "total/updates")),
        "flops": number(last, "total/flops"),
        "generated_tokens": int(number(last, "total/generated_tokens")),
        **_fate_of_tokens(steps),
        "seconds_training": sum(record["seconds/step"] for record in steps),
        "groups_drawn": sum(int(record.get("drawn", 0)) for record in steps),
        "groups_kept": sum(int(record.get("kept", 0)) for record in steps),
        "peak_memory_gb": max([peak_memory_gb, *(record["memory/peak_gb"] for record in records)]),
    }
    (run_dir / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _fate_of_tokens(steps: Sequence[Record]) -> dict[str, Any]:
    """Tokens of answers that were trained on, and the share of those that dynamic sampling generated in vain."""
    kept = sum(number(step, "tokens/kept") for step in steps)
    dropped = sum(number(step, key) for step in steps for key in DROPPED_TOKENS)
    told = kept + dropped > 0
    return {
        "kept_tokens": int(kept) if told else None,
        "share_dropped_tokens": dropped / (kept + dropped) if told else None,
    }


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print the summary as a short table."""
    table = Table(title="summary", show_header=False)
    for when in ("before", "after"):
        table.add_row(f"accuracy {when}", _with_interval(summary[f"accuracy_{when}"], summary[f"interval_{when}"]))
    table.add_row("gain", _with_interval(summary["gain"], summary["interval_gain"]))
    table.add_row("training", f"{summary['steps']} steps in {summary['seconds_training']:.0f} s")
    table.add_row("updates", f"{summary['updates']:,}")
    table.add_row("FLOPs", f"{summary['flops']:.3g}, generation and training")
    table.add_row("groups", f"{summary['groups_kept']} kept of {summary['groups_drawn']} drawn")
    kept, dropped = summary["kept_tokens"], summary["share_dropped_tokens"]
    told = "" if kept is None else f", {kept:,} trained on"
    table.add_row("tokens", f"{summary['generated_tokens']:,} generated{told}")
    if dropped is not None:
        table.add_row("dynamic sampling", f"{dropped:.1%} of the tokens in answers that were not trained on")
    table.add_row("peak memory", f"{summary['peak_memory_gb']:.1f} GB, all processes together")
    console.print(table)


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return "not measured"
    return f"{value:.3f}  [{interval[0]:.3f}, {interval[1]:.3f}]"
