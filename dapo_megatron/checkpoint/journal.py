"""Conversions that can be interrupted: what is done already, and the processes that share the work.

A conversion works in `OUT.incomplete` and renames it when everything is there. Each of its processes has a journal,
progress-N.jsonl, with a line for every parameter that is safely on the disk; the first line says what is being
converted. One that is started again takes up where it was, also with another number of processes.
"""

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from dapo_megatron.checkpoint.raw import disk_errors
from dapo_megatron.errors import UserError
from dapo_megatron.files import fsync

COMMIT_BYTES = 1 << 30  # written between two flushes to the disk: what an interruption may cost
JOURNALS = "progress-*.jsonl"
_PATIENCE = timedelta(days=1)  # the others wait while one process finishes a checkpoint of terabytes

Entry = dict[str, Any]


class Workspace:
    """The folder of a conversion and this process's journal in it.

    Args:
        out: where the result goes. It must not be there yet.
        job: what is converted, as JSON; a folder left by another job is thrown away.
        flush: puts on the disk what this process has written so far.

    Attributes:
        folder: where files are written.
        done: entries of all earlier journals.

    Raises:
        UserError: if `out` exists already.
    """

    def __init__(self, out: Path, job: Entry, flush: Callable[[], None]) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out: {out} exists already: remove it, or choose another name")
        self.out, self.folder = out, out.with_name(out.name + ".incomplete")
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._flush, self._job = flush, json.dumps(job, sort_keys=True)
        self._pending: list[str] = []
        self._bytes = 0
        if self.rank == 0:
            self._prepare()
        self.barrier()
        self.done = [entry for path in self._journals() for entry in _entries(path)]
        self.barrier()  # nobody writes before all have read
        self._journal = self.folder / f"progress-{self.rank}.jsonl"
        if self._journal.exists():
            _drop_torn_line(self._journal)
        else:
            with disk_errors(self._journal):
                self._journal.write_text(self._job + "\n")

    def _prepare(self) -> None:
        journals = self._journals()
        if any(path.read_text().partition("\n")[0] != self._job for path in journals) or not journals:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _journals(self) -> list[Path]:
        return sorted(self.folder.glob(JOURNALS))

    def add(self, entry: Entry, num_bytes: int) -> None:
        """Note that something was written; it counts once it is on the disk."""
        self._pending.append(json.dumps(entry) + "\n")
        self._bytes += num_bytes
        if self._bytes >= COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Flush what was written, then the journal. Raises UserError if the disk is full."""
        with disk_errors(self._journal):
            self._flush()
            with self._journal.open("a") as file:
                file.writelines(self._pending)
            fsync(self._journal)
        self._pending, self._bytes = [], 0

    def all_entries(self) -> list[Entry]:
        """The entries of all processes, once all have committed."""
        self.commit()
        self.barrier()
        return [entry for path in self._journals() for entry in _entries(path)]

    def finish(self) -> None:
        """Remove the journals: from now on nothing is left to be done but a new name. On one process."""
        for path in self._journals():
            path.unlink()

    def publish(self) -> None:
        """Make the folder the result: journals away, everything on the disk, renamed. On one process."""
        self.finish()
        for path in self.folder.rglob("*"):
            fsync(path)
        fsync(self.folder)
        if self.out.exists():
            self.out.rmdir()
        self.folder.rename(self.out)
        fsync(self.out.parent)

    def barrier(self) -> None:
        """Wait for the other processes, where there are any."""
        if self.size > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=_PATIENCE)
            dist.barrier()


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that was not written to its end: another would be written behind it."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _entries(path: Path) -> list[Entry]:
    """The lines of a journal after its first, but for a last one that was not written to its end."""
    lines = path.read_text().splitlines(keepends=True)[1:]
    return [json.loads(line) for line in lines if line.endswith("\n")]
