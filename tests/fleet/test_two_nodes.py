"""The cluster's entry on one machine: launch/train.sh twice, as two nodes would run it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.monitoring.metrics import read_metrics
from dapo_megatron.rollout.server import free_port
from tests.fleet.test_run import RUN_SECONDS, sections
from tests.models import REPOSITORY
from tests.processes import descendants

LOOPBACK = "127.0.0.1"
PRIVATE = "127.0.0.2"  # stands for the private address of both nodes: rank 0's node is told by it alone
pytestmark = pytest.mark.timeout(RUN_SECONDS + 60)


@contextmanager
def node(*arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """One node's torchrun agent and all that it starts; nothing of it is left afterwards."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NNODES": "2", "NPROC": "1", "LOCAL_ADDR": PRIVATE} | variables
    process = subprocess.Popen(
        [str(REPOSITORY / "launch" / "train.sh"), *arguments],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def test_two_nodes_train_together(
    tiny_model: Path, task: Path, tiny_fleet: FleetConfig, borrowed: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    run_dir = tmp_path / "run"
    config.write_text(yaml.safe_dump(sections(tiny_model, task, tiny_fleet, run_dir)))
    arguments = [str(config), "run.steps=2", "evaluation.data=null", *borrowed]
    variables = {"RDZV_ENDPOINT": f"{LOOPBACK}:{free_port(LOOPBACK)}", "RDZV_ID": "two-nodes"}
    with ExitStack() as nodes:
        agents = [nodes.enter_context(node(*arguments, **variables)) for _ in range(2)]
        outputs = [agent.communicate(timeout=RUN_SECONDS)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(output[-4000:] for output in outputs)
    steps = read_metrics(run_dir)
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["first_log_ratio"] == 0.0 and record["rollout_diff_max"] < 1e-3 for record in steps)
    assert (run_dir / "hf" / "model.safetensors").is_file()
    # Only the agent of rank 0 shows the run; the other's rank had its controller at the address that it was told.
    assert sum("step 2/2" in output or "2/2" in output for output in outputs) == 1
