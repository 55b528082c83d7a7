"""Run a worker module on several ranks, with a timeout, leaving no process behind."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.models import REPOSITORY


class Launcher:
    """Runs worker modules on ranks that one process forks, which is started when it is needed first.

    As under torchrun the ranks meet at a store that none of them has opened.
    """

    def __init__(self) -> None:
        self._parent: subprocess.Popen[str] | None = None

    def __call__(
        self, ranks: int, module: str, job: dict[str, Any], folder: Path, timeout: float = 240
    ) -> dict[str, Any]:
        """Run `python -m module JOB.json` on `ranks` processes; rank 0 writes job["result"], returned here.

        Raises:
            AssertionError: if a rank failed, with the end of what all have printed, or took more than `timeout`
                seconds.
        """
        name = f"{module}-{ranks}"
        job = job | {"result": str(folder / f"{name}.json")}
        path, log = folder / f"{name}-job.json", folder / f"{name}.log"
        path.write_text(json.dumps(job))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        request = {"ranks": ranks, "module": module, "job": str(path), "log": str(log), "port": store.port}
        codes = self._ask(request, timeout)
        assert codes == [0] * ranks, f"the ranks that ended: {codes}\n{log.read_text()[-6000:] if log.exists() else ''}"
        result: dict[str, Any] = json.loads(Path(job["result"]).read_text())
        return result

    def _ask(self, request: dict[str, Any], timeout: float) -> list[int]:
        """Exit codes of the ranks that ended by themselves, none if it took too long. Unless it answers, all end."""
        parent = self._parent = self._parent or _start_parent()
        assert parent.stdin is not None
        assert parent.stdout is not None
        answer = ""
        try:
            print(json.dumps(request), file=parent.stdin, flush=True)
            if select.select([parent.stdout], [], [], timeout)[0]:
                answer = parent.stdout.readline()
        finally:
            if not answer:
                self.close()
        codes: list[int] = json.loads(answer or "[]")
        return codes

    def close(self) -> None:
        """End the parent, and with it all ranks and what they have started."""
        if self._parent is None:
            return
        os.killpg(self._parent.pid, signal.SIGKILL)
        with self._parent:  # closes its pipes and waits for it
            self._parent = None


def _start_parent() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.rank_parent"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
