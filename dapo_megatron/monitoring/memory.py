"""Memory of all processes of a run together."""

import os
import threading

import psutil


def launcher_pid() -> int:
    """The process that all processes of the run descend from: torchrun's where there is one, else this one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def tree_memory_gb(root_pid: int) -> float:
    """Memory of a process and all its descendants in GB (10^9 bytes).

    Shared pages are counted once (proportional set size). Where the system does not report that, resident memory
    is added up, which counts shared pages several times.
    """
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    return sum(map(_process_bytes, processes)) / 1e9


def _process_bytes(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
    except psutil.Error:  # it ended meanwhile, or belongs to somebody else
        return 0
    return int(getattr(info, "pss", info.rss))


class MemorySampler:
    """Measures a process tree in a background thread. `current_gb` is the last sample, `peak_gb` the largest."""

    def __init__(self, root_pid: int, interval: float = 1.0) -> None:
        """Start sampling the tree below `root_pid` every `interval` seconds."""
        self.current_gb = 0.0
        self.peak_gb = 0.0
        self._root_pid = root_pid
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.current_gb = tree_memory_gb(self._root_pid)
            self.peak_gb = max(self.peak_gb, self.current_gb)
            if self._stopped.wait(self._interval):
                return

    def close(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        self._thread.join()
