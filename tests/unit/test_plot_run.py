"""The picture of a run, from a small metrics.jsonl."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dapo_megatron.monitoring.metrics import MetricsWriter
from tools.plot_run import COSTS, Run, draw, load_run, main

STEP = {"accuracy": 0.3, "entropy": 0.5, "clip_high_probability": 0.1, "response_length": 40.0}


def totals(step: int) -> dict[str, float]:
    return {"total/updates": 2.0 * step, "total/generated_tokens": 100.0 * step, "total/flops": 1e12 * step}


def write_run(run_dir: Path, **changes: Any) -> Path:
    """An evaluation, three steps and an evaluation; a change to None writes null."""
    writer = MetricsWriter(run_dir)
    writer.evaluation({"step": 0, "evaluation": "before", "accuracy": 0.2, "interval": [0.1, 0.4], **totals(0)})
    for step in (1, 2, 3):
        writer.step({"step": step, **totals(step), **STEP, "accuracy": step / 10, **changes})
    writer.evaluation(
        {"step": 3, "evaluation": "after", "accuracy": 0.6, "interval": [0.5, 0.9], **totals(3)} | changes
    )
    writer.close()
    return run_dir


def drawn(run: Run, panel: int) -> list[list[tuple[float, float]]]:
    """The points of every line with points in a panel of the picture."""
    lines = [line.get_xydata().tolist() for line in draw([run]).axes[panel].get_lines()]
    return [[tuple(point) for point in line] for line in lines if line]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_writes_a_picture_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    out = tmp_path / f"picture.{suffix}"
    main([str(write_run(tmp_path / "one")), str(write_run(tmp_path / "two")), "--out", str(out)])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"wrote {out}\n", "")
    if suffix == "png":
        with Image.open(out) as picture:
            assert picture.size == (1800, 960)
            assert len(picture.getcolors(1 << 20) or []) > 100
    else:
        assert out.read_text().count("<path") > 50


def test_accuracy_stands_at_what_was_spent_for_the_weights_it_measures(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run"))
    for panel, (key, spent) in enumerate(zip(COSTS, (2.0, 100.0, 1e12), strict=True)):
        training, evaluations, *caps = drawn(run, panel)
        assert training == [(0.0, 0.1), (spent, 0.2), (2 * spent, 0.3)], key
        assert evaluations == [(0.0, 0.2), (3 * spent, 0.6)]
        low, high = caps
        assert [y for _, y in low] == pytest.approx([0.1, 0.5])
        assert [y for _, y in high] == pytest.approx([0.4, 0.9])
    assert drawn(run, 3) == [[(1.0, 0.5), (2.0, 0.5), (3.0, 0.5)]]


def test_what_was_not_recorded_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_run(write_run(Path("run"), entropy=None, **{"total/flops": 0.0}))
    figure = draw([run])
    errors = capsys.readouterr().err
    assert errors == "plot_run: run did not record total/flops\nplot_run: run did not record entropy\n"
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["", "", "not recorded: run", "not recorded: run", "", ""]
    assert drawn(run, 2) == drawn(run, 3) == []


def test_legend_names_the_runs_that_are_drawn(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / "one", entropy=None)), load_run(write_run(tmp_path / "two"))]
    accuracy, _, _, entropy, *_ = draw(runs).axes
    one, two = (run.name for run in runs)
    assert accuracy.get_legend_handles_labels()[1] == [one, two, f"{one}, evaluation", f"{two}, evaluation"]
    assert entropy.get_legend_handles_labels()[1] == [two]
    assert entropy.get_lines()[0].get_color() == "C1"  # the same as in every panel


def test_null_leaves_a_gap_only_where_it_stands(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    writer = MetricsWriter(run_dir, start_step=3)
    writer.step({"step": 4, **totals(4), **STEP, "response_length": float("nan")})
    writer.close()
    assert [x for x, _ in drawn(load_run(run_dir), 5)[0]] == [1.0, 2.0, 3.0]
    assert [x for x, _ in drawn(load_run(run_dir), 3)[0]] == [1.0, 2.0, 3.0, 4.0]


def test_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"metrics\.jsonl is missing or empty"):
        main([str(tmp_path), "--out", str(tmp_path / "picture.png")])


def test_other_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(write_run(tmp_path / "run")), "--out", str(tmp_path / "picture.txt")])
    assert "--out must end in .png or .svg, not picture.txt" in capsys.readouterr().err
