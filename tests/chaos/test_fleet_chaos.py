"""A run that loses servers: one is killed and started again, one is frozen and continued, and nothing is lost."""

from pathlib import Path

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.monitoring.metrics import read_metrics
from dapo_megatron.rollout.records import read_records
from tests.chaos.audit import audit, lost_seconds
from tests.chaos.watching import Watcher, states, write_config
from tests.fleet.conftest import write_task
from tests.fleet.test_run import started
from tests.fleet.tiny import write_tiny_model

STEPS, SECONDS = 10, 900
pytestmark = pytest.mark.timeout(SECONDS + 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def task(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(model, tmp_path_factory.mktemp("task"))


def config(model: Path, task: Path, folder: Path, **parallel: int) -> Path:
    """Two servers, whose answers take a while."""
    fleet = FleetConfig(
        servers=2,
        dtype="float32",
        kv_cache_gb=0.03,
        max_num_seqs=16,
        stream_interval=4,
        health_every=1,
        stall_timeout=45,  # a frozen server is killed after as long again, and is continued before that
        push_timeout=60,
        max_restarts=1,
    )
    return write_config(model, task, folder, fleet, STEPS, **parallel)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {}], ids=["TP2", "PP2", "DP2"])
def test_a_run_survives_a_killed_and_a_frozen_server(
    model: Path, task: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    path, run = config(model, task, tmp_path, **parallel), tmp_path / "run"
    with started(path, ranks=2) as process:
        watcher = Watcher(run, process, SECONDS)
        watcher.in_step(3)
        for member in watcher.server(0):
            member.kill()
        watcher.in_step(5)  # steps are over sooner than a server is back: the trainer waits for it
        ranks = watcher.processes("-u -m dapo_megatron.train")
        for rank in ranks:
            rank.suspend()
        watcher.wait(lambda records: states(records, "server_0").count("joining") == 2, "the killed server")
        for rank in ranks:
            rank.resume()
        watcher.in_step(6)
        frozen = watcher.server(1)
        for member in frozen:
            member.suspend()
        watcher.in_step(8)
        for member in frozen:
            member.resume()
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output[-4000:]
    assert [record["step"] for record in read_metrics(run) if "evaluation" not in record] == list(range(1, STEPS + 1))
    assert audit(run / "rollouts") == []
    records = list(read_records(run / "rollouts"))
    for id, restarts in (("server_0", 1), ("server_1", 0)):
        events = states(records, id)
        assert (events.count("restarted"), events.count("removed"), events[-1]) == (restarts, 1, "ready"), events
    assert [r["version"] for r in records if r["kind"] == "push"][-1] == STEPS
    lost = {id: round(seconds, 1) for id, seconds in lost_seconds(run / "rollouts").items()}
    print(f"{parallel or 'DP2'}: seconds lost: {lost}")
