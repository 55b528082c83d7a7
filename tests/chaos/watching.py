"""A run with long answers, and what is needed to disturb it at the right moment."""

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import yaml

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.records import RECORDS, read_records
from tests.fleet.test_run import sections

# Judges the first character alone, so that answers may be long.
REWARD = "def reward(answer):\n    return 1.0 if answer.text[:1] == answer.ground_truth else -1.0\n"


def write_config(model: Path, task: Path, folder: Path, fleet: FleetConfig, steps: int, **parallel: int) -> Path:
    """The configuration of a run in `folder`/run, whose answers take a while."""
    (folder / "reward.py").write_text(REWARD)
    values = sections(model, task, fleet, folder / "run")
    values["run"] |= {"steps": steps, "save_every": None, "export": False}
    values["data"]["reward_function"] = f"{folder}/reward.py:reward"
    values["rollout"] |= {"max_tokens": 160}
    values["training"] |= {"micro_batch_tokens": 2048}
    values["parallel"] = parallel
    values["evaluation"] = {}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class Watcher:
    """Reads a run's records as they come, and finds its processes."""

    def __init__(self, run: Path, process: "subprocess.Popen[str]", seconds: float) -> None:
        self._folder, self._process, self._seconds = run / "rollouts", process, seconds

    def wait(self, wanted: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """Wait until the records are as `wanted`."""
        deadline = time.monotonic() + self._seconds
        while not ((self._folder / RECORDS).exists() and wanted(list(read_records(self._folder)))):
            assert self._process.poll() is None, f"{what}: the run ended\n{self._process.communicate()[0][-4000:]}"
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def in_step(self, step: int) -> None:
        """Wait until answers of a step are under way."""
        self.wait(lambda records: any(r["kind"] == "draw" and r["step"] == step for r in records), f"step {step}")
        time.sleep(0.5)  # until some have tokens

    def processes(self, words: str) -> list[psutil.Process]:
        """Those of the run that have these words in their command lines."""
        started = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in started if f" {words} " in f" {' '.join(process.cmdline())} "]

    def server(self, index: int) -> list[psutil.Process]:
        """The processes of a server, which is known by its seed."""
        (leader,) = self.processes(f"--seed {1 + index}")
        return [leader, *leader.children(recursive=True)]


def states(records: Iterable[dict[str, Any]], id: str) -> list[str]:
    """What happened to a server."""
    return [record["state"] for record in records if record["kind"] == "server" and record["id"] == id]
