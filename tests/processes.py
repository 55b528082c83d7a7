"""Whether processes have ended."""

import time
from pathlib import Path


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: R runs, S sleeps, T is stopped, Z has ended; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended but whose parent has not asked yet (a zombie) does not."""
    return state_of(pid) not in ("", "Z")


def gone_within(pid: int, seconds: float) -> bool:
    """Wait until a process has ended, at most `seconds`; whether it has."""
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and those that they started."""
    direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return direct + [descendant for child in direct for descendant in descendants(child)]
