"""Run a worker script under torchrun, with a timeout, leaving no process behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.models import REPOSITORY


def torchrun(ranks: int, module: str, job: dict[str, Any], folder: Path, timeout: float = 240) -> dict[str, Any]:
    """Run `python -m module JOB.json` on `ranks` processes; the worker's rank 0 writes job["result"], returned here."""
    job = job | {"result": str(folder / f"{module}-{ranks}.json")}
    path = folder / f"job-{ranks}.json"
    path.write_text(json.dumps(job))
    log = folder / f"{module}-{ranks}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "-m", module, str(path)],
            env=environment,
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, f"torchrun ended with {code}:\n{log.read_text()[-6000:]}"
    result: dict[str, Any] = json.loads(Path(job["result"]).read_text())
    return result
