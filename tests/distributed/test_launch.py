"""Ranks of a worker module: one that fails or is late ends the others, and the next ones are not affected."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import Launcher
from tests.processes import gone_within

pytestmark = pytest.mark.timeout(200)


def main() -> None:
    """A rank: it says who it is, and does what its job says."""
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    Path(job["folder"], f"{rank}.pid").write_text(str(os.getpid()))
    while len(list(Path(job["folder"]).glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    if job["does"] == "fails" and rank == 1:
        raise ValueError("rank 1 has had enough")
    if job["does"] != "ends":
        time.sleep(600)
    if rank == 0:
        Path(job["result"]).write_text(json.dumps({"parent": os.getppid()}))


@pytest.mark.parametrize(
    ("does", "timeout", "message"), [("fails", 120, "rank 1 has had enough"), ("sleeps", 5, r"ended: \[\]")]
)
def test_no_rank_is_left(run_ranks: Launcher, tmp_path: Path, does: str, timeout: float, message: str) -> None:
    (tmp_path / "warm").mkdir()
    run_ranks(1, __name__, {"does": "ends", "folder": str(tmp_path / "warm")}, tmp_path)  # what is late is not a start
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, __name__, {"does": does, "folder": str(tmp_path)}, tmp_path, timeout)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert all(gone_within(pid, 10) for pid in pids)


def test_ranks_are_forked_from_one_process_that_ends_with_the_launcher(tmp_path: Path) -> None:
    launcher = Launcher()
    try:
        job = {"does": "ends", "folder": str(tmp_path)}
        parents = [launcher(1, __name__, job, tmp_path)["parent"] for _ in range(2)]
    finally:
        launcher.close()
    assert parents[0] == parents[1] != os.getpid()
    assert gone_within(parents[0], 10)
