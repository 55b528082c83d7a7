"""Conversions that can be interrupted: what is done already, and the processes that share the work.

A conversion works in `OUT.incomplete` and renames it when everything is there. Each of its processes has a journal,
progress-N.jsonl, with a line for every parameter that is safely on the disk; the first line says what is being
converted. One that is started again takes up where it was, also with another number of processes. `OUT.lock` is there
as long as `OUT.incomplete` belongs to a conversion, and locked as long as that one runs.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from dapo_megatron.checkpoint.raw import disk_errors
from dapo_megatron.errors import UserError
from dapo_megatron.files import fsync

COMMIT_BYTES = 256 << 20  # written between two flushes to the disk: about what an interruption may cost
JOURNALS = "progress-*.jsonl"
_PATIENCE = timedelta(days=1)  # the others wait while one process finishes a checkpoint of terabytes

Entry = dict[str, Any]

# Locks belong to open files; by path, so that a process can start again what it broke off.
_HELD: dict[Path, IO[str]] = {}


def make_way(out: Path) -> None:
    """Make sure that a folder can get the name `out` when it is finished; an empty folder of that name goes now.

    Raises:
        UserError: if `out` is there and not empty, or cannot be removed.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir() or any(out.iterdir()):
        raise UserError(f"--out: {out} exists already: remove it, or choose another name")
    try:
        out.rmdir()
    except OSError as error:  # a mount point, or a link to a folder
        raise UserError(
            f"--out: {out} cannot be replaced by the result ({error.strerror}): choose a name within it"
        ) from None


def lock_path(out: Path) -> Path:
    """The file that is locked while there is a conversion into `out`."""
    return out.with_name(out.name + ".lock")


class Workspace:
    """The folder of a conversion and this process's journal in it.

    Args:
        out: where the result goes. It must not be there yet, or be empty.
        job: what is converted, as JSON; a folder left by another job is thrown away.
        flush: puts on the disk what this process has written so far. It is called from another thread.

    Attributes:
        folder: where files are written.
        done: entries of all earlier journals.

    Raises:
        UserError: if `out` exists already, another process writes there, or a folder that no conversion left has the
            name that this one works under.
    """

    def __init__(self, out: Path, job: Entry, flush: Callable[[], None]) -> None:
        self.out, self.folder = out, out.with_name(out.name + ".incomplete")
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._flush, self._job = flush, json.dumps(job, sort_keys=True)
        self._pending: list[str] = []
        self._bytes = 0
        self._committer = ThreadPoolExecutor(1)
        self._commits: Future[None] = self._committer.submit(lambda: None)  # the latest
        if self.rank == 0:
            self._claim()
        self.barrier()
        self.done = [entry for path in self._journals() for entry in _entries(path)]
        self.barrier()  # nobody writes before all have read
        self._journal = self.folder / f"progress-{self.rank}.jsonl"
        if self._journal.exists():
            _drop_torn_line(self._journal)
        else:
            with disk_errors(self._journal):
                self._journal.write_text(self._job + "\n")

    def _claim(self) -> None:
        """Lock, then make way and a folder, on one process."""
        lock = lock_path(self.out)
        was_ours = lock.exists()
        lock.parent.mkdir(parents=True, exist_ok=True)
        _hold(lock)
        try:
            make_way(self.out)
            self._prepare(was_ours=was_ours)
        except UserError:
            self.release()
            raise

    def _prepare(self, *, was_ours: bool) -> None:
        journals = self._journals()
        if not (journals or was_ours or _is_free(self.folder)):
            raise UserError(
                f"--out: {self.folder} is in the way, and no conversion has left it: remove it, or choose another name"
            )
        if any(path.read_text().partition("\n")[0] != self._job for path in journals) or not journals:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _journals(self) -> list[Path]:
        return sorted(self.folder.glob(JOURNALS))

    def add(self, entry: Entry, num_bytes: int) -> None:
        """Note that something was written; it counts once it is on the disk. Work goes on while the disk is busy."""
        self._pending.append(json.dumps(entry) + "\n")
        self._bytes += num_bytes
        if self._bytes >= COMMIT_BYTES:
            self._start_commit()

    def commit(self) -> None:
        """Flush what was written, then the journal. Raises UserError if the disk is full."""
        self._start_commit()
        self._commits.result()

    def settle(self) -> None:
        """Wait for a commit that was started, whether it succeeds or not."""
        self._commits.exception()

    def abandon(self) -> None:
        """Leave the rest to a later start, in whichever process: nothing is written after this."""
        self.settle()
        if self.rank == 0:
            self.release()

    def _start_commit(self) -> None:
        self._commits.result()
        lines, self._pending, self._bytes = self._pending, [], 0
        self._commits = self._committer.submit(self._write_down, lines)

    def _write_down(self, lines: Sequence[str]) -> None:
        """Lines that are there before what they tell of would be lies after a power failure."""
        with disk_errors(self._journal):
            self._flush()
            with self._journal.open("a") as file:
                file.writelines(lines)
            fsync(self._journal)

    def all_entries(self) -> list[Entry]:
        """The entries of all processes, once all have committed."""
        self.commit()
        self.barrier()
        entries = [entry for path in self._journals() for entry in _entries(path)]
        self.barrier()  # the first process removes the journals soon
        return entries

    def finish(self) -> None:
        """Remove the journals: from now on nothing is left to be done but a new name. On one process."""
        for path in self._journals():
            path.unlink()

    def publish(self) -> None:
        """Make the folder the result: journals away, everything on the disk, renamed, released. On one process."""
        self.finish()
        for path in self.folder.rglob("*"):
            fsync(path)
        fsync(self.folder)
        self.folder.rename(self.out)
        fsync(self.out.parent)
        self.release()

    def release(self) -> None:
        """Let others write there: after the folder got its name. On one process."""
        lock = lock_path(self.out)
        lock.unlink(missing_ok=True)
        _HELD.pop(lock.absolute()).close()

    def barrier(self) -> None:
        """Wait for the other processes, where there are any."""
        if self.size > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=_PATIENCE)
            dist.barrier()


def _hold(lock: Path) -> None:
    """Take a lock until it is released or the process ends, however that happens."""
    if (held := _HELD.get(lock.absolute())) is not None and _is_at(held, lock):
        return
    with disk_errors(lock):
        file = lock.open("a")
    taken = UserError(f"--out: another conversion writes to {lock.with_suffix('')} at this moment: wait for it")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # some file systems know no locks
            raise
    if not _is_at(file, lock):  # the other one has released it since it was opened
        raise taken
    _HELD[lock.absolute()] = file


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_free(folder: Path) -> bool:
    """Whether there is nothing of this name but an empty folder at most."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that was not written to its end: another would be written behind it."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _entries(path: Path) -> list[Entry]:
    """The lines of a journal after its first, but for a last one that was not written to its end."""
    lines = path.read_text().splitlines(keepends=True)[1:]
    return [json.loads(line) for line in lines if line.endswith("\n")]
