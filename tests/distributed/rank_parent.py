"""The parent of all ranks: it imports what they need once, which takes seconds, and forks them when it is asked to.

It computes nothing and has a single thread, so that no rank starts with a lock that is held, or with threads or
connections that are gone. A rank finds what torchrun would have left it, and a worker module runs under torchrun too.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from dapo_megatron.processes import PR_SET_PDEATHSIG

HERE = Path(__file__).parent


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(request: dict[str, Any]) -> list[int]:
    """Fork `ranks` processes that run `python -m module job`, and wait until all have ended or one has failed.

    Returns:
        The exit codes (-signal of those that were killed) of the ranks that ended by themselves, in that order.
    """
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: it is not safe to fork"
    pids = {_fork(request, rank) for rank in range(request["ranks"])}
    codes = []
    while pids and not any(codes):
        pid, status = os.wait()
        pids.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_rank(request, rank)
    return pid


def _be_rank(request: dict[str, Any], rank: int) -> NoReturn:
    """In the forked process, which never gets back to the loop of its parent."""
    code = 1
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_environment(request, rank))
        sys.argv = [request["module"], request["job"]]
        importlib.import_module(request["module"]).main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without what the parent has registered for its own end


def _environment(request: dict[str, Any], rank: int) -> dict[str, str]:
    """Torchrun's, on one node, whose store another process has opened."""
    size = str(request["ranks"])
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(request["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def main() -> None:
    die_with_parent()
    for path in sorted(HERE.glob("*_worker.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
