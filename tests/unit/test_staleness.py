"""The comparison of pipelines: valid arms, right verdicts, a page that says what was found."""

import math
from pathlib import Path

import orjson
import pytest

from dapo_megatron.config.load import load_config
from examples.ablation.run import BASE, FINISHED, Job, read_plan
from examples.staleness.report import compare, read_finished, write
from examples.staleness.run import ARMS
from tests.unit.test_ablation import changes, write_run

T_TWO = 2.919985580353726  # Student's t, 95 % one-sided, 2 degrees of freedom: any table


def test_arms_differ_by_what_they_say() -> None:
    plan = read_plan(ARMS)
    ((_, arms),) = plan.tables.items()
    assert arms == list(plan.arms)
    configs = {arm: load_config(BASE, overrides) for arm, overrides in plan.arms.items()}
    pipeline, bound = "rollout.pipeline", "rollout.max_staleness"
    corrected = {pipeline, "algorithm.rollout_correction.mode"}
    assert [changes(configs["sync"], config) for config in configs.values()] == [
        set(),
        {"rollout.partial_rollouts"},
        corrected,
        corrected | {bound},
        corrected | {bound},
    ]
    assert [config.rollout.staleness_bound for config in configs.values()] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.01, -0.01, 0.0], "non-inferior"),
        ([-0.07, -0.071, -0.069], "non-inferior"),  # worse for sure, by less than the margin
        ([-0.2, -0.21, -0.19], "inferior"),
        ([-0.1, -0.02, 0.0], "inconclusive"),
        ([-0.2, -0.02, -0.1], "inconclusive"),
        ([0.3], "inconclusive"),
    ],
)
def test_verdict(differences: list[float], verdict: str) -> None:
    found = compare(differences)
    assert (found.verdict, found.seeds) == (verdict, len(differences))


def test_bounds_are_one_sided() -> None:
    found = compare([0.1, 0.2, 0.3])
    half = T_TWO * 0.1 / math.sqrt(3)
    assert (found.difference, found.lower, found.upper) == pytest.approx((0.2, 0.2 - half, 0.2 + half), rel=1e-9)
    with pytest.raises(ValueError, match="no seed"):
        compare([])


def finished(folder: Path, arm: str, seed: int, accuracy: float) -> Job:
    job = Job(arm, seed, folder / arm / f"seed_{seed}", [], "1")
    write_run(job.folder)
    summary = orjson.loads((job.folder / "summary.json").read_bytes())
    (job.folder / "summary.json").write_bytes(orjson.dumps(summary | {"accuracy_after": accuracy}))
    (job.folder / FINISHED).write_bytes(orjson.dumps({"fingerprint": "1"}))
    steps = [{"step": n, "generated_tokens": 1, "staleness": n / 4, "staleness_max": float(n)} for n in (1, 3)]
    steps.append({"step": 4, "generated_tokens": 1, "staleness": None})  # skipped
    steps.append({"step": 4, "evaluation": "after", "staleness_max": 99.0})
    (job.folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(step) + b"\n" for step in steps))
    return job


def test_metrics_are_summed_over_steps(tmp_path: Path) -> None:
    run = read_finished(finished(tmp_path, "sync", 1, 0.5))
    assert (run.accuracy, run.seconds) == (0.5, 12.5)
    assert (run.metrics["staleness"], run.metrics["staleness_max"]) == (0.5, 3.0)
    assert math.isnan(run.metrics["rollout_weight"])


def test_page_and_data(tmp_path: Path) -> None:
    """Seeds that the reference lacks are not compared; unfinished runs are left out."""
    jobs = [finished(tmp_path, "sync", seed, 0.5) for seed in (1, 2)]
    jobs += [finished(tmp_path, "async_2", seed, accuracy) for seed, accuracy in ((1, 0.51), (2, 0.52), (3, 0.1))]
    jobs.append(Job("resume", 1, tmp_path / "resume" / "seed_1", [], "1"))
    paths = write(read_plan(ARMS), jobs, tmp_path / "out")
    assert [path.name for path in paths] == ["staleness.md", "staleness.json"]
    text = paths[0].read_text()
    assert "| `sync` | 2 | 0.500 |  |  |  | 12 |" in text
    assert "| `async_2` | 3 | 0.377 | +0.015 | -0.017 | non-inferior | 12 |" in text
    assert "| `async_2` | 0.50 | 3 |" in text
    assert "`resume` |" not in text.split("overrides")[0]
    alone = write(read_plan(ARMS), [jobs[0], jobs[2]], tmp_path / "alone")[0].read_text()
    assert "| `async_2` | 1 | 0.510 | +0.010 | - | inconclusive | 12 |" in alone
    data = orjson.loads(paths[1].read_bytes())
    assert data["compared"]["async_2"]["seeds"] == 2
    assert set(data["compared"]) == {"async_2"}
