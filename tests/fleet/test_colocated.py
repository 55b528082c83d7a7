"""A run whose server shares the trainer's devices. A CPU has no memory to take turns with: the order is what counts."""

import re
from pathlib import Path

import pytest
import yaml

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.monitoring.metrics import read_metrics
from tests.fleet.test_run import RUN_SECONDS, sections, train

pytestmark = pytest.mark.timeout(RUN_SECONDS + 60)


def test_server_sleeps_while_the_trainer_trains(
    tiny_model: Path, task: Path, tiny_fleet: FleetConfig, tmp_path: Path
) -> None:
    """Weights come through shared memory, and are those that answers are sampled with."""
    made = sections(tiny_model, task, tiny_fleet.model_copy(update={"mode": "colocated"}), tmp_path / "run")
    made["run"] |= {"steps": 2, "export": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(made))
    train(tmp_path / "config.yaml", "evaluation.data=null")
    steps = [record for record in read_metrics(tmp_path / "run") if "evaluation" not in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["rollout_diff_max"] < 1e-3 for record in steps)
    log = (tmp_path / "run" / "logs" / "server_0.log").read_text()
    turns = re.findall(r"(seconds to fall asleep|to wake up tags \['\w+'\])", log)
    awake = ["to wake up tags ['weights']", "to wake up tags ['kv_cache']"]
    assert turns == ["seconds to fall asleep", *awake] * 3  # it joins asleep, and sleeps in each step
