"""A run that generates while it trains, with a real server: no token is too old, and a push breaks nothing."""

from pathlib import Path

import numpy as np
import orjson
import pytest
import yaml

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.monitoring.metrics import read_metrics
from dapo_megatron.rollout.journal import Journal
from tests.fleet.test_run import sections, train

STEPS, BOUND = 4, 2

pytestmark = pytest.mark.timeout(600)


def test_asynchronous_run(
    tiny_model: Path, task: Path, tiny_fleet: FleetConfig, borrowed: list[str], tmp_path: Path
) -> None:
    """Answers are ended and continued around every push, and those that were not needed go on later."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(sections(tiny_model, task, tiny_fleet, tmp_path / "run")))
    pipeline = ["rollout.pipeline=async", f"rollout.max_staleness={BOUND}", "rollout.partial_rollouts=resume"]
    correction = ["algorithm.rollout_correction.mode=tis", "algorithm.rollout_correction.max_token_staleness=1"]
    train(config, f"run.steps={STEPS}", "evaluation.data=null", "run.export=false", *borrowed, *pipeline, *correction)

    steps = [record for record in read_metrics(tmp_path / "run") if not record["skipped"]]
    assert max(record["staleness_max"] for record in steps) <= BOUND
    assert max(record["off_policy_tokens"] for record in steps) > 0
    assert all(record["first_log_ratio"] == 0 for record in steps)
    for trained, record in enumerate(steps):
        header, _ = Journal(tmp_path / "run" / "rollouts").read(record["step"])
        ages = trained - header.run_versions
        assert 0 <= ages.min() <= ages.max() <= BOUND
        masked = np.sum(header.run_lengths, where=ages > 1) / header.run_lengths.sum()
        assert record["stale_masked"] == pytest.approx(masked)
    events = [orjson.loads(line) for line in (tmp_path / "run" / "rollouts" / "events.jsonl").read_bytes().splitlines()]
    states = [event["state"] for event in events if event["kind"] == "server"]
    assert not {"suspect", "removed", "restarted"} & set(states)
    assert [event["version"] for event in events if event["kind"] == "push"][-1] == len(steps)
