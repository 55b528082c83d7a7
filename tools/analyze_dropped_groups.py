"""What dynamic sampling dropped in a run, by category: a table for finding rewards that judge some problems wrongly.

    python tools/analyze_dropped_groups.py runs/addition --by data_source
    python tools/analyze_dropped_groups.py runs/addition --by my_categories.py:topic

Reads the groups recorded in RUN_DIR/rollouts. `--by` is `data_source`, `length` (mean tokens of the group's answers, in
powers of two), `verdict`, or FILE.py:function: a function that gets a group's record, a dict, and returns the name of
its category. `--json` prints one JSON object in place of the table.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo_megatron.errors import UserError
from dapo_megatron.rollout.report import read_groups

SUSPECT_SHARE = 0.9
"""A category is flagged when this share of its dropped answers could not be judged."""

UNJUDGED = ("no_answer", "bad_gold", "bad_reward")
"""Verdicts that say more of the reward than of the answer."""

FLAG = "looks like a miscalibrated reward"
Record = dict[str, Any]
Category = Callable[[Record], str]


@dataclass(frozen=True)
class Row:
    """One category. Shares and means are None where there is nothing to take them of.

    `no_answer` and `truncated` are shares of the dropped answers, `unjudged` that of all reasons in UNJUDGED. Mean
    tokens are per answer.
    """

    category: str
    kept: int
    dropped: int
    all_right: int
    all_wrong: int
    failed: int
    no_answer: float | None
    unjudged: float | None
    truncated: float | None
    mean_tokens: float | None
    kept_truncated: float | None
    kept_mean_tokens: float | None

    @property
    def suspect(self) -> bool:
        """Whether nearly all dropped answers could not be judged."""
        return self.unjudged is not None and self.unjudged >= SUSPECT_SHARE


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, count, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Tell by category what dynamic sampling dropped in a run.")
    parser.add_argument("run_dir", type=Path, help="the run's folder")
    parser.add_argument("--by", default="data_source", help="data_source, length, verdict or FILE.py:function")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        rows = summarise(read_groups(options.run_dir / "rollouts"), category_function(options.by))
        if not rows:
            raise UserError(f"{options.run_dir / 'rollouts'} holds no recorded groups (groups_*.jsonl)")
    except (UserError, ValueError) as error:
        print(f"analyze_dropped_groups: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"by": options.by, "categories": [asdict(row) | {"suspect": row.suspect} for row in rows]}))
    else:
        print_table(rows, options.by, Console())
    return 0


def category_function(by: str) -> Category:
    """The function that names a group's category.

    Raises:
        UserError: for an unknown name, or when the file cannot be imported or has no such function.
    """
    if by in BUILT_IN:
        return BUILT_IN[by]
    file, colon, name = by.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UserError(f"--by {by}: choose {', '.join(BUILT_IN)} or FILE.py:function")
    spec = importlib.util.spec_from_file_location("categories", file)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file may raise
        raise UserError(f"--by {by}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    function: Category | None = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"--by {by}: {file} has no function {name}")
    return function


def summarise(records: Iterable[Record], category: Category) -> list[Row]:
    """One row per category, the one with the most dropped groups first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(str(category(record)), []).append(record)
    rows = [_row(name, members) for name, members in found.items()]
    return sorted(rows, key=lambda row: (-row.dropped, row.category))


def print_table(rows: Sequence[Row], by: str, console: Console) -> None:
    """Print the rows, and below them a line for each flagged category."""
    table = Table(title=f"Dropped groups by {by}")
    table.add_column("category")
    for heading in ("kept", "dropped", "all right", "all wrong", "failed"):
        table.add_column(heading, justify="right")
    for heading in ("no answer", "cut off (kept)", "mean tokens (kept)"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            escape(row.category),
            *(str(count) for count in (row.kept, row.dropped, row.all_right, row.all_wrong, row.failed)),
            _text(row.no_answer, ".0%"),
            f"{_text(row.truncated, '.0%')} ({_text(row.kept_truncated, '.0%')})",
            f"{_text(row.mean_tokens, '.1f')} ({_text(row.kept_mean_tokens, '.1f')})",
        )
    console.print(table)
    for row in rows:
        if row.suspect:
            share = _text(row.unjudged, ".0%")
            text = f"{row.category} {FLAG}: {share} of its dropped answers are one of {', '.join(UNJUDGED)}"
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _row(name: str, members: Sequence[Record]) -> Row:
    kept = [record for record in members if record["verdict"] == "kept"]
    dropped = [record for record in members if record["verdict"] != "kept"]
    verdicts = [record["verdict"] for record in dropped]
    reasons = {reason: sum(record["reasons"].get(reason, 0) for record in dropped) for reason in UNJUDGED}
    answers, kept_answers = _total(dropped, "answers"), _total(kept, "answers")
    return Row(
        category=name,
        kept=len(kept),
        dropped=len(dropped),
        all_right=verdicts.count("all_right"),
        all_wrong=verdicts.count("all_wrong"),
        failed=verdicts.count("failed"),
        no_answer=_ratio(reasons["no_answer"], answers),
        unjudged=_ratio(sum(reasons.values()), answers),
        truncated=_ratio(_total(dropped, "truncated"), answers),
        mean_tokens=_ratio(_total(dropped, "tokens"), answers),
        kept_truncated=_ratio(_total(kept, "truncated"), kept_answers),
        kept_mean_tokens=_ratio(_total(kept, "tokens"), kept_answers),
    )


def _total(records: Sequence[Record], key: str) -> int:
    return sum(record[key] for record in records)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _by_length(record: Record) -> str:
    if not record["tokens"]:
        return "no tokens"
    low = 1 << (max(1, round(record["tokens"] / record["answers"])).bit_length() - 1)
    return f"{low}-{2 * low - 1} tokens"


BUILT_IN: dict[str, Category] = {
    "data_source": lambda record: record["data_source"] or "(none)",
    "length": _by_length,
    "verdict": lambda record: record["verdict"],
}

if __name__ == "__main__":
    sys.exit(main())
