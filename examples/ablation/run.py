"""Run the arms of the ablation over several seeds and write what they achieved.

    python -m examples.ablation.run --seeds 5 --jobs 2 --out runs/ablation

Each run is a `dapo-megatron train` of its own. Those that are finished, with the same configuration and model, are not
run again: after Ctrl-C the same command goes on. A run that fails is reported at the end with the end of its log (exit
code 1); the others go on. Results, also of a part of the runs: OUT/results.md, .json and .svg.
"""

import argparse
import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import yaml

from dapo_megatron.config.load import load_config
from dapo_megatron.errors import UserError
from dapo_megatron.monitoring.summary import SUMMARY_FILE
from dapo_megatron.processes import PR_SET_PDEATHSIG
from examples.ablation.report import Plan, Results, Run, read_run, write

HERE = Path(__file__).parent
BASE, ARMS = HERE / "base.yaml", HERE / "arms.yaml"
FINISHED = "ablation.json"  # in the folder of a finished run: its fingerprint
GRACE = 30.0  # seconds a run has to end its servers when it is stopped
POLL = 0.2  # seconds between looks at the running processes
LOG_LINES = 15


@dataclass(frozen=True)
class Job:
    """One run: what to start, the folder it fills, and a fingerprint of all that decides its outcome."""

    arm: str
    seed: int
    folder: Path
    command: Sequence[str]
    fingerprint: str

    @property
    def log(self) -> Path:
        """Where its output goes: beside the folder, which the run itself makes."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def finished(self) -> bool:
        """Whether it ran to its end as it is now."""
        path = self.folder / FINISHED
        if not path.is_file() or not (self.folder / SUMMARY_FILE).is_file():
            return False
        return bool(orjson.loads(path.read_bytes())["fingerprint"] == self.fingerprint)


@dataclass(frozen=True)
class Failure:
    """A run that did not finish, and why."""

    job: Job
    reason: str

    def text(self) -> str:
        """The reason and the end of the log."""
        lines = self.job.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.job.log.is_file() else []
        return "\n".join([f"{self.job.arm}, seed {self.job.seed}: {self.reason}", *(f"    {line}" for line in lines)])


def read_plan(path: Path) -> Plan:
    """arms.yaml, or one like it.

    Raises:
        UserError: when it cannot be read or compares arms that it does not define.
    """
    try:
        return Plan(**yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def make_jobs(plan: Plan, arms: Sequence[str], seeds: int, base: Path, out: Path) -> list[Job]:
    """The runs of `arms` with the seeds 1 to `seeds`, seed by seed, so that an early stop leaves pairs.

    Raises:
        UserError: for an unknown arm and for overrides that are not valid.
    """
    if unknown := [arm for arm in arms if arm not in plan.arms]:
        raise UserError(f"--arms: {unknown[0]} must be one of {', '.join(plan.arms)}")
    weights: dict[str, str] = {}
    jobs = []
    for seed in range(1, seeds + 1):
        for arm in arms:
            folder = out / arm / f"seed_{seed}"
            overrides = [*plan.arms[arm], f"run.seed={seed}", f"run.dir={folder}"]
            config = load_config(base, overrides)
            if config.model.path not in weights:
                weights[config.model.path] = _hash_of_files(Path(config.model.path))
            said = config.model_dump_json(exclude={"run": {"dir"}}) + weights[config.model.path]
            command = [sys.executable, "-m", "dapo_megatron.cli", "train", str(base), *overrides]
            jobs.append(Job(arm, seed, folder, command, hashlib.sha256(said.encode()).hexdigest()))
    return jobs


def _hash_of_files(folder: Path) -> str:
    if not folder.is_dir():
        raise UserError(
            f"model.path: {folder} does not exist; make it: python -m examples.ablation.make_model {folder}"
        )
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def run_jobs(jobs: Sequence[Job], parallel: int, timeout: float) -> list[Failure]:
    """Run what is not finished, `parallel` at a time, none longer than `timeout` seconds; returns what failed.

    Whatever ends this function ends the runs that it started.
    """
    waiting = [job for job in jobs if not job.finished]
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them finished before", flush=True)
    running: list[_Running] = []
    failures: list[Failure] = []
    with contextlib.ExitStack() as processes:
        while waiting or running:
            while waiting and len(running) < parallel:
                running.append(processes.enter_context(_started(waiting.pop(0), timeout)))
            time.sleep(POLL)
            for run in [run for run in running if run.ended]:
                running.remove(run)
                failure = run.outcome()
                failures += [failure] if failure else []
                result = failure.reason if failure else "finished"
                print(f"{run.job.arm}, seed {run.job.seed}: {result} after {run.seconds:.0f} s", flush=True)
    return failures


class _Running:
    """A run that was started."""

    def __init__(self, job: Job, process: subprocess.Popen[bytes], timeout: float) -> None:
        self.job, self._process, self._timeout = job, process, timeout
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        """Whether it came to its end, or its time is over."""
        return self._process.poll() is not None or self.seconds > self._timeout

    def outcome(self) -> Failure | None:
        """Marks the folder as finished, or says why it is not."""
        code = self._process.poll()
        if code is None:
            self.stop()
            return Failure(self.job, f"not finished after {self._timeout:g} s")
        if code:
            return Failure(self.job, f"ended with code {code}")
        (self.job.folder / FINISHED).write_bytes(orjson.dumps({"fingerprint": self.job.fingerprint}))
        return None

    def stop(self) -> None:
        """Ends the run and its process group: asks, then kills."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def _started(job: Job, timeout: float) -> Iterator[_Running]:
    """Starts a run from scratch: half a run's folder would make its times meaningless."""
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the runs
            preexec_fn=_die_with_parent,
        )
    run = _Running(job, process, timeout)
    try:
        yield run
    finally:
        run.stop()


def _die_with_parent() -> None:
    """Between fork and exec: if this process is killed outright, the kernel asks the run to end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def finished_runs(jobs: Sequence[Job]) -> list[Run]:
    """What is to be reported."""
    return [read_run(job.folder, job.arm, job.seed) for job in jobs if job.finished]


def parse(arguments: Sequence[str] | None, description: str, out: Path) -> argparse.Namespace:
    """The options of a harness; `out` is the default of --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each arm, with the seeds 1 to N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at the same time, a core each")
    parser.add_argument("--arms", metavar="A,B", help="only these arms of arms.yaml")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder of all runs")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="most seconds of one run")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="write the results there as well")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.jobs) < 1 or options.timeout <= 0:
        parser.error("--seeds, --jobs and --timeout must be positive")
    return options


Report = Callable[[Plan, Sequence[Job], Path], Sequence[Path]]
"""Writes what the finished jobs of a plan achieved into a folder; returns the files."""


def main(arguments: Sequence[str] | None = None, base: Path = BASE, arms: Path = ARMS) -> int:
    """The ablation; exit codes of `run_and_report`."""
    options = parse(arguments, "Run the ablation and report it.", Path("runs/ablation"))
    return run_and_report(options, base, arms, lambda plan, jobs, to: write(Results(plan, finished_runs(jobs)), to))


def run_and_report(options: argparse.Namespace, base: Path, arms: Path, report: Report) -> int:
    """Exit code 0, 1 when a run failed, 2 for a user error, 130 for Ctrl-C and 143 for SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `with` blocks are left
    try:
        plan = read_plan(arms)
        chosen = options.arms.split(",") if options.arms else list(plan.arms)
        jobs = make_jobs(plan, chosen, options.seeds, base, options.out)
        failures = run_jobs(jobs, options.jobs, options.timeout)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for folder in [options.out, *([options.publish] if options.publish else [])]:
        print("wrote", *report(plan, jobs, folder))
    for failure in failures:
        print(failure.text(), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
