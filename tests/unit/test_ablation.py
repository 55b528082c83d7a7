"""The ablation: its arms are valid, its statistics right, and its runs neither lost nor done twice."""

import itertools
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from examples.ablation.report import COLUMNS, Estimate, Plan, Results, Run, estimate, read_run, write
from examples.ablation.run import ARMS, BASE, Job, finished_runs, main, make_jobs, read_plan, run_jobs
from tests.models import REPOSITORY

T_TWO, T_FOUR = 4.302652729749464, 2.7764451051977934  # Student's t, 97.5 %, 2 and 4 degrees of freedom: any table
PLAN = Plan({"a": [], "b": [], "c": [], "d": []}, {"Chain": ["a", "b", "c"]}, {"Square": ["a", "b", "c", "d"]})


def finished(arm: str, seed: int, accuracy: float, **figures: float) -> Run:
    return Run(arm, seed, dict.fromkeys(COLUMNS, 1.0) | {"accuracy": accuracy} | figures, [0.1, accuracy], [500, 1000])


def example() -> Results:
    scores = {"a": [0.2, 0.3, 0.4], "b": [0.3, 0.4, 0.8], "c": [0.5, 0.5, 0.5], "d": [0.9, 0.8, 1.0]}
    return Results(PLAN, [finished(arm, seed, x) for arm in scores for seed, x in enumerate(scores[arm], start=1)])


@pytest.fixture(scope="module")
def arms() -> dict[str, Config]:
    return {arm: load_config(BASE, overrides) for arm, overrides in read_plan(ARMS).arms.items()}


def changes(first: Config, second: Config) -> set[str]:
    """Dotted keys that differ, the preset's name left out."""

    def flat(values: dict, prefix: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in values.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return found

    left, right = flat(first.model_dump()), flat(second.model_dump())
    return {key for key in left if left[key] != right[key]} - {"algorithm.preset"}


def test_each_row_of_the_chain_changes_one_thing(arms: dict[str, Config]) -> None:
    chain = [arms[name] for name in next(iter(read_plan(ARMS).tables.values()))]
    assert [changes(before, after) for before, after in itertools.pairwise(chain)] == [
        {"algorithm.overlong.filter"},
        {"algorithm.clip.high"},
        {"algorithm.overlong.cache_tokens"},
        {"algorithm.aggregation"},
        {"rollout.dynamic_sampling"},
    ]


def test_the_other_comparisons_change_what_they_say(arms: dict[str, Config]) -> None:
    plan = read_plan(ARMS)
    sweep = [arms[name] for name in plan.tables["Upper clip range (dapo has 0.28)"]]
    assert [config.algorithm.clip.high for config in sweep] == [0.20, 0.24, 0.28, 0.32, 0.40]
    assert all(changes(arms["dapo"], config) <= {"algorithm.clip.high"} for config in sweep)
    assert changes(arms["dapo"], arms["dapo_with_kl"]) == {"algorithm.kl.coefficient"}
    square = [arms[name] for name in plan.squares["Clip-higher and dynamic sampling"]]
    assert [(config.algorithm.clip.high, config.rollout.dynamic_sampling) for config in square] == [
        (0.2, False),
        (0.28, False),
        (0.2, True),
        (0.28, True),
    ]


def test_every_arm_is_compared() -> None:
    plan = read_plan(ARMS)
    compared = {arm for names in [*plan.tables.values(), *plan.squares.values()] for arm in names}
    assert compared == set(plan.arms)


def test_the_task_acts_on_every_part(arms: dict[str, Config]) -> None:
    config = arms["+dynamic_sampling"]
    assert config.responses_per_step // config.training.mini_batch >= 4  # ratios leave 1, so that clipping acts
    longest_right = 8  # seven totals and the line's end
    assert config.rollout.max_tokens - config.algorithm.overlong.cache_tokens >= longest_right  # runaways alone pay


def test_estimate() -> None:
    result = estimate([1.0, 2.0, 3.0, math.nan])
    assert result.mean == 2.0
    assert result.margin == pytest.approx(T_TWO / math.sqrt(3), rel=1e-12)
    result = estimate([0.0, 0.0, 0.0, 0.0, 5.0])
    assert (result.mean, result.margin) == (1.0, pytest.approx(T_FOUR, rel=1e-12))  # deviation sqrt(5), n = 5
    assert estimate([0.5]).mean == 0.5
    assert math.isnan(estimate([0.5]).margin)
    assert math.isnan(estimate([]).mean)


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (Estimate(0.25, 0.125), "+.3f", "+0.250 ± 0.125"),
        (Estimate(-0.25, 0.125), ".2f", "-0.25 ± 0.12"),
        (Estimate(3.0, math.nan), ".0f", "3"),
        (Estimate(math.nan, math.nan), ".0f", "-"),
    ],
)
def test_text_of_an_estimate(value: Estimate, form: str, text: str) -> None:
    assert value.text(form) == text


def test_rows_are_compared_with_the_row_above_by_seed() -> None:
    rows = dict(example().steps_of("Chain"))
    assert rows["a"] is None
    second, third = rows["b"], rows["c"]
    assert second is not None
    assert third is not None
    # b - a: 0.1, 0.1, 0.4, mean 0.2, sample deviation sqrt(0.03)
    assert second.mean == pytest.approx(0.2, rel=1e-12)
    assert second.margin == pytest.approx(T_TWO * math.sqrt(0.03) / math.sqrt(3), rel=1e-12)
    assert third.mean == pytest.approx(0.0, abs=1e-12)  # c - b: 0.2, 0.1, -0.3


def test_effects_of_a_square() -> None:
    effects = example().effects("Square")
    assert effects is not None
    means = [effect.mean for effect in effects.values()]
    assert means == pytest.approx([0.2, 0.2, 0.6, 0.2], rel=1e-12)
    # d - b - c + a: 0.3, 0.2, 0.1: deviation 0.1
    assert list(effects.values())[3].margin == pytest.approx(T_TWO * 0.1 / math.sqrt(3), rel=1e-12)


def test_only_seeds_that_both_have_are_compared() -> None:
    runs = [finished("a", 1, 0.2), finished("a", 2, 0.9), finished("b", 2, 1.0), finished("b", 3, 0.0)]
    assert Results(PLAN, runs).contrast({"b": 1, "a": -1}).mean == pytest.approx(0.1, rel=1e-12)


def test_rows_without_runs_are_left_out() -> None:
    results = Results(PLAN, [finished("a", 1, 0.2), finished("c", 1, 0.5)])
    rows = dict(results.steps_of("Chain"))
    assert list(rows) == ["a", "c"]
    assert rows["c"] is not None
    assert rows["c"].mean == pytest.approx(0.3, rel=1e-12)
    assert results.effects("Square") is None
    assert "Square" not in results.markdown()


def test_markdown_and_files(tmp_path: Path) -> None:
    paths = write(example(), tmp_path / "published")
    assert [path.name for path in paths] == ["results.md", "results.json", "results.svg"]
    text = paths[0].read_text()
    assert "| `b` | 3 | 0.500 ± 0.657 | +0.200 ± 0.430 | +1.000 ± 0.000 | 1 |" in text
    assert "| both beyond the sum of the two | +0.200 ± 0.248 |" in text
    data = orjson.loads(paths[1].read_bytes())
    assert data["arms"]["d"]["accuracy"]["mean"] == pytest.approx(0.9, rel=1e-12)
    assert len(data["runs"]) == 12
    assert paths[2].read_text().count("<svg") == 1


def write_run(folder: Path) -> None:
    """What a finished run of three steps leaves."""
    (folder / "evaluations").mkdir(parents=True)
    steps = [
        {"step": 1, "accuracy": 0.1, "generated_tokens": 1000, "entropy": 0.5, "clip_high_probability": 0.2},
        {"step": 1, "evaluation": "step_1", "accuracy": 0.9},
        {"step": 2, "accuracy": None, "generated_tokens": 2000},  # skipped
        {"step": 3, "accuracy": 0.4, "generated_tokens": 500, "entropy": 0.1, "clip_high_probability": None},
    ]
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(step) + b"\n" for step in steps))
    summary = {"accuracy_after": 0.75, "gain": 0.5, "steps": 3, "seconds_training": 12.5}
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    after = {"truncated": 0.01, "response_length": 6.5}
    (folder / "evaluations" / "after.json").write_bytes(orjson.dumps(after))


def test_read_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = read_run(tmp_path, "a", 2)
    assert run.figures == {
        "accuracy": 0.75,
        "gain": 0.5,
        "steps": 3,
        "kilotokens": 3.5,
        "seconds": 12.5,
        "entropy": pytest.approx(0.3),
        "truncated": 0.01,
        "length": 6.5,
        "clipped_probability": 0.2,
    }
    assert run.tokens == [1000, 3000, 3500]
    assert run.curve[0] == 0.1
    assert math.isnan(run.curve[1])


SUCCEEDS = (
    "import pathlib, shutil, sys; folder = pathlib.Path(sys.argv[1]); "
    "shutil.copytree(folder.parent / 'finished', folder, dirs_exist_ok=True); "
    "open(folder.parent / 'starts', 'a').write('x')"
)


@pytest.fixture
def finishes(tmp_path: Path) -> str:
    """A program that leaves what a finished run does."""
    write_run(tmp_path / "finished")
    return SUCCEEDS


def job(folder: Path, program: str, fingerprint: str = "1") -> Job:
    return Job("a", 1, folder, [sys.executable, "-c", program, str(folder)], fingerprint)


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


def test_a_finished_run_is_not_run_again_unless_it_changed(finishes: str, tmp_path: Path) -> None:
    first = job(tmp_path / "run", finishes)
    assert run_jobs([first], 1, 60) == []
    assert first.finished
    assert run_jobs([first], 1, 60) == []
    assert starts(tmp_path) == 1
    changed = job(tmp_path / "run", finishes, fingerprint="2")
    assert not changed.finished
    assert run_jobs([changed], 1, 60) == []
    assert starts(tmp_path) == 2
    assert [run.figures["accuracy"] for run in finished_runs([first, changed])] == [0.75]


def test_an_unfinished_run_starts_from_scratch(finishes: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run")  # a summary, but not marked by the harness
    (tmp_path / "run" / "left").touch()
    run = job(tmp_path / "run", finishes)
    assert not run.finished
    run_jobs([run], 1, 60)
    assert run.finished
    assert not (tmp_path / "run" / "left").exists()


def test_a_failing_run_is_reported_and_the_others_go_on(finishes: str, tmp_path: Path) -> None:
    fails = job(tmp_path / "fails", "print('what went wrong'); raise SystemExit(3)")
    succeeds = job(tmp_path / "succeeds", finishes)
    (failure,) = run_jobs([fails, succeeds], 1, 60)
    assert failure.job == fails
    assert failure.text() == "a, seed 1: ended with code 3\n    what went wrong"
    assert succeeds.finished
    assert not fails.finished


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    (failure,) = run_jobs([job(tmp_path / "slow", "import time; time.sleep(100)")], 1, 0.5)
    assert failure.reason == "not finished after 0.5 s"
    assert time.monotonic() - started < 50


def test_runs_end_with_the_harness(tmp_path: Path) -> None:
    """Even when it is killed outright."""
    program = (
        "import pathlib, sys; from tests.unit.test_ablation import job; from examples.ablation.run import run_jobs; "
        "folder = pathlib.Path(sys.argv[1]); sleeps = 'import os, sys, time; "
        'open(sys.argv[1] + "/pid", "w").write(str(os.getpid())); time.sleep(100)\'; '
        "run_jobs([job(folder, sleeps)], 1, 90)"
    )
    harness = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "run")], cwd=REPOSITORY)
    pid_file = tmp_path / "run" / "pid"
    wait_for(lambda: pid_file.is_file() and pid_file.read_text() != "")
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    process = Path("/proc") / pid_file.read_text() / "stat"
    wait_for(lambda: not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def write_base(folder: Path) -> Path:
    """base.yaml with a model of two files."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "weights").write_text("1")
    base = folder / "base.yaml"
    base.write_text(BASE.read_text().replace("models/chain-sum-tiny", str(folder / "model")))
    return base


def test_jobs(tmp_path: Path) -> None:
    base, plan = write_base(tmp_path), read_plan(ARMS)
    jobs = make_jobs(plan, ["dapo", "dapo_high_0.40"], 2, base, tmp_path / "out")
    assert [(job.arm, job.seed) for job in jobs] == [
        ("dapo", 1),
        ("dapo_high_0.40", 1),
        ("dapo", 2),
        ("dapo_high_0.40", 2),
    ]
    assert len({job.fingerprint for job in jobs}) == 4
    assert jobs[1].command[1:] == [
        *("-m", "dapo_megatron.cli", "train", str(base), "algorithm=dapo", "algorithm.clip.high=0.40"),
        *("run.seed=1", f"run.dir={tmp_path}/out/dapo_high_0.40/seed_1"),
    ]
    moved = make_jobs(plan, ["dapo"], 1, base, tmp_path / "elsewhere")[0]
    assert moved.fingerprint == jobs[0].fingerprint
    (tmp_path / "model" / "weights").write_text("2")
    assert make_jobs(plan, ["dapo"], 1, base, tmp_path / "out")[0].fingerprint != jobs[0].fingerprint


def test_what_the_user_got_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path)
    assert main(["--arms", "dapoo", "--out", str(tmp_path)], base) == 2
    assert "--arms: dapoo must be one of naive_grpo, " in capsys.readouterr().err
    (tmp_path / "missing.yaml").write_text(BASE.read_text().replace("models/chain-sum-tiny", str(tmp_path / "none")))
    assert main(["--arms", "dapo", "--out", str(tmp_path)], tmp_path / "missing.yaml") == 2
    assert "none does not exist; make it: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: {a: []}\ntables: {T: [a, b]}\nsquares: {}", "T: b is not among the arms"),
        ("arms: {a: []}\ntables: {}\nsquares: {S: [a, a]}", "squares: S must have four arms, not 2"),
        ("arms: {}", "missing 2 required positional arguments"),
    ],
)
def test_a_wrong_plan(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "arms.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_plan(tmp_path / "arms.yaml")


def test_a_failure_of_a_real_run_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's folder holds no model: the run itself refuses it."""
    base = write_base(tmp_path)
    code = main(["--arms", "dapo", "--seeds", "1", "--out", str(tmp_path / "out")], base)
    assert code == 1
    error = capsys.readouterr().err
    assert error.startswith("dapo, seed 1: ended with code 2\n")
    assert "model.path" in error
    assert (tmp_path / "out" / "results.md").is_file()
