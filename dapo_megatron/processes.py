"""Processes that do not outlive the one that started them. Standard library only: servers import it too."""

import ctypes
import os
import signal
import threading
import time

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, grace: float) -> None:
    """Ties this process, the leader of its group, to process `parent`.

    The kernel sends SIGTERM when the parent dies, however that happens. A thread looks after the rest: a
    parent that was gone before, and a process or a child that does not end within `grace` seconds.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch_parent, args=(parent, grace), name="parent-watch", daemon=True).start()


def _watch_parent(parent: int, grace: float) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    os.killpg(os.getpgrp(), signal.SIGKILL)
