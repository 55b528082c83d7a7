"""metrics.jsonl: one JSON object per training step and per evaluation."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

METRICS_FILE = "metrics.jsonl"
EVALUATIONS = "evaluations"
# Running totals, and the metrics of a step that each adds up: what accuracy is drawn against.
TOTALS = {
    "total/updates": ("updates",),
    "total/generated_tokens": ("generated_tokens",),
    "total/flops": ("flops/generated", "flops/trained"),
}
Record = dict[str, Any]


class MetricsWriter:
    """Appends records to `run_dir`/metrics.jsonl, each complete on disk as soon as it is written.

    Args:
        run_dir: folder of the run; made when missing.
        start_step: steps finished before. Records of later steps, left by a run that was stopped after its last
            saved state, are dropped: those steps are done again.

    `last` is the last record that was kept, empty in a new run.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        kept = [record for record in read_metrics(run_dir) if start_step and record["step"] <= start_step]
        self.last: Record = kept[-1] if kept else {}
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(map(_line, kept)))
        os.replace(beside, path)
        self._file = path.open("a", buffering=1)

    def step(self, record: Record) -> None:
        """Write a training step."""
        self._file.write(_line(record))

    def evaluation(self, record: Record) -> None:
        """Write an evaluation."""
        self._file.write(_line(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(run_dir: Path) -> Iterator[Record]:
    """All records of a run, oldest first. A last line that was cut off by a crash is left out."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            return


def number(record: Mapping[str, Any], key: str) -> float:
    """A metric that may be missing, null or NaN, which count as 0."""
    value = record.get(key)
    return float(value) if value is not None and math.isfinite(value) else 0.0


def running_totals(before: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, float]:
    """`TOTALS` after a step.

    Args:
        before: the totals so far, as an earlier record holds them; those that are missing start at 0.
        step: metrics of the step alone.
    """
    return {total: number(before, total) + sum(number(step, key) for key in keys) for total, keys in TOTALS.items()}


def write_evaluation(run_dir: Path, name: str, result: Mapping[str, Any]) -> None:
    """Keep the full result of an evaluation, with the score of every problem, in `run_dir`/evaluations/`name`.json."""
    path = run_dir / EVALUATIONS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_line(result))


def read_scores(run_dir: Path, name: str) -> list[float] | None:
    """Mean score of every problem in the evaluation `name`, or None when it was not made."""
    path = run_dir / EVALUATIONS / f"{name}.json"
    return [float(score) for score in orjson.loads(path.read_bytes())["scores"]] if path.exists() else None


def _line(record: Mapping[str, Any]) -> str:
    """JSON text of a record; NaN and infinities become null, which every JSON reader understands."""
    return orjson.dumps(record, default=float, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE).decode()
