"""Megatron's checkpoint writer without the processes that it starts.

For a save megatron-core forks a process per file, out of a trainer that has threads, and collects the results through
a manager process that lives on when the trainer is killed. A save that the trainer waits for needs neither.
"""

import queue
from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def write_in_process() -> None:
    """Make `megatron.core.dist_checkpointing.save` write its files in the calling process. Idempotent."""
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
    filesystem_async._results_queue = queue.Queue()


def _write(
    transforms: list[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: "queue.Queue[Any]"
) -> None:
    """Write each bucket (one file); put what was written, or the first error, into `results`."""
    written: queue.Queue[tuple[int, Any]] = queue.Queue()
    pending: queue.Queue[int] = queue.Queue()
    for i, bucket in enumerate(buckets):
        pending.put(i)
        FileSystemWriterAsync.write_preloaded_data(transforms, i, bucket, written, pending, use_fsync=True)
    outcomes = dict(written.get() for _ in buckets)
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    results.put(errors[0] if errors else outcomes)
