"""What the launcher makes of its ranks' ends: exit codes, messages, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
rank = int(os.environ["RANK"])
(folder / f"{rank}.tmp").write_text(str(os.getpid()))
(folder / f"{rank}.tmp").rename(folder / f"{rank}.pid")
"""


@contextmanager
def launched(folder: Path, script: str, ranks: int = 1) -> Iterator[subprocess.Popen[str]]:
    """The launcher running `script` on `ranks` ranks; killed with its ranks at the end, whatever happens."""
    file = folder / "rank.py"
    file.write_text(RANK + script)
    command = [sys.executable, "-m", "dapo_megatron.launcher", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen([*command, str(file), str(folder)], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        for path in folder.glob("*.pid"):
            if psutil.pid_exists(pid := int(path.read_text())):
                os.kill(pid, signal.SIGKILL)


def rank_pids(folder: Path, ranks: int) -> list[int]:
    deadline = time.monotonic() + 40
    while len(files := list(folder.glob("*.pid"))) < ranks:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("code", [0, 2])
def test_exit_code_of_the_rank_is_kept_without_a_traceback_of_torchrun(tmp_path: Path, code: int) -> None:
    with launched(tmp_path, f"print('the rank explains', file=sys.stderr); sys.exit({code})") as process:
        _, stderr = process.communicate(timeout=50)
    assert process.returncode == code
    assert stderr == "the rank explains\n"


def test_killed_rank_is_named_and_takes_the_others_along(tmp_path: Path) -> None:
    script = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)"
    with launched(tmp_path, script, ranks=2) as process:
        pids = rank_pids(tmp_path, 2)
        _, stderr = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGKILL
    assert stderr == "dapo-megatron: rank 1 was ended by SIGKILL; the machine may be out of memory\n"
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_every_rank(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    script = "signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(600)"
    with launched(tmp_path, script, ranks=2) as process:
        pids = rank_pids(tmp_path, 2)
        time.sleep(0.5)
        process.send_signal(sent)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert stderr == ""
    assert not any(map(psutil.pid_exists, pids))
