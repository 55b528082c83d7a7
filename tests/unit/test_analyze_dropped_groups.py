"""The tool from a run's folder to its table, on records as a run writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.rollout.report import GroupReport
from dapo_megatron.rollout.statistics import Draw, Outcome
from dapo_megatron.types import Prompt
from tests.unit.test_rollout_report import answer
from tools.analyze_dropped_groups import FLAG, main

GROUPS: list[tuple[str, Outcome, list[tuple[bool, int, str, str]]]] = [
    ("sums", "kept", [(True, 4, "correct", "stop"), (False, 6, "wrong", "stop")]),
    ("sums", "kept", [(True, 10, "correct", "stop"), (False, 20, "wrong", "length")]),
    ("sums", "all_right", [(True, 3, "correct", "stop"), (True, 5, "correct", "stop")]),
    ("sums", "all_wrong", [(False, 7, "wrong", "stop"), (False, 9, "no_answer", "length")]),
    ("sums", "surplus", [(False, 99, "wrong", "stop")]),
    ("units", "all_wrong", [(False, 8, "no_answer", "stop"), (False, 8, "bad_gold", "stop")]),
    ("units", "all_wrong", [(False, 8, "no_answer", "stop"), (False, 8, "no_answer", "stop")]),
    ("", "failed", []),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    draws = [
        Draw(i, Prompt(i, (i,), "", source), outcome, tuple(answer(*sample[:2], *sample[2:]) for sample in samples))
        for i, (source, outcome, samples) in enumerate(GROUPS)
    ]
    report = GroupReport(tmp_path / "rollouts", lambda ids: f"problem {ids[0]}")
    report.write(1, draws[:4])
    report.write(2, draws[4:])
    return tmp_path


def rows(run_dir: Path, capsys: pytest.CaptureFixture[str], by: str) -> dict[str, dict[str, Any]]:
    assert main([str(run_dir), "--by", by, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["by"] == by
    return {row.pop("category"): row for row in output["categories"]}


def test_counts_and_shares_of_each_data_source(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(run_dir, capsys, "data_source")
    assert list(found) == ["sums", "units", "(none)"]
    assert found["sums"] == {
        "kept": 2,
        "dropped": 2,
        "all_right": 1,
        "all_wrong": 1,
        "failed": 0,
        "no_answer": 0.25,
        "unjudged": 0.25,
        "truncated": 0.25,
        "mean_tokens": 6.0,
        "kept_truncated": 0.25,
        "kept_mean_tokens": 10.0,
        "suspect": False,
    }
    assert found["units"]["no_answer"] == 0.75
    assert (found["units"]["unjudged"], found["units"]["suspect"]) == (1.0, True)
    assert found["units"]["kept_mean_tokens"] is None
    assert (found["(none)"]["failed"], found["(none)"]["no_answer"], found["(none)"]["suspect"]) == (1, None, False)


def test_other_categories(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    verdicts = rows(run_dir, capsys, "verdict")
    assert {name: row["kept"] + row["dropped"] for name, row in verdicts.items()} == {
        "all_wrong": 3,
        "all_right": 1,
        "failed": 1,
        "kept": 2,
    }
    lengths = rows(run_dir, capsys, "length")
    assert {name: row["kept"] + row["dropped"] for name, row in lengths.items()} == {
        "8-15 tokens": 4,
        "4-7 tokens": 2,
        "no tokens": 1,
    }
    file = tmp_path / "mine.py"
    file.write_text("def parity(record):\n    return 'even' if int(record['prompt'].split()[1]) % 2 == 0 else 'odd'\n")
    mine = rows(run_dir, capsys, f"{file}:parity")
    assert {name: row["dropped"] for name, row in mine.items()} == {"odd": 3, "even": 2}


def test_the_table_flags_what_cannot_be_judged(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "Dropped groups by data_source" in text
    assert text.count(FLAG) == 1
    assert f"units {FLAG}: 100% of its dropped answers" in text


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("topic", "choose data_source, length, verdict or FILE.py:function"),
        ("nowhere.py:f", "nowhere.py cannot be imported: FileNotFoundError"),
        ("{here}:g", "has no function g"),
    ],
)
def test_a_category_that_cannot_be_had_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str, message: str
) -> None:
    (tmp_path / "here.py").write_text("f = str\n")
    assert main([str(run_dir), "--by", by.format(here=tmp_path / "here.py")]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no recorded groups" in capsys.readouterr().err
