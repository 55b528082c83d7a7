"""What happened to every prompt, answer, server and push, in the order in which it happened: append-only lines of JSON.

Reading them proves that nothing was lost, trained twice or trained under weights that it was not sampled with.
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from dapo_megatron.types import Int32

RECORDS = "events.jsonl"
BLOCK = 1 << 16  # bytes to search at a time for the end of the last line


class Records:
    """Appends to `events.jsonl` in `folder`. Each line is a record: its `kind`, and what belongs to the kind.

    What a crash left of a last line is cut off: the next record would be part of it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / RECORDS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)  # a line is one write: readers never see half of one
        self._file.truncate(_whole_lines(self.path))

    def add(self, kind: str, **members: Any) -> None:
        """Append one record. Raises OSError where it cannot be written whole."""
        line = orjson.dumps({"kind": kind, **members}, option=orjson.OPT_APPEND_NEWLINE)
        if (written := self._file.write(line)) != len(line):
            raise OSError(f"{self.path}: {written} of {len(line)} bytes of a record were written; is the disk full?")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def read_records(folder: str | Path) -> Iterator[dict[str, Any]]:
    """All records in `folder`; a last line that a crash cut off is left out."""
    for line in (Path(folder) / RECORDS).read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield orjson.loads(line)


def digest(token_ids: Int32) -> str:
    """32 hex digits that stand for an answer or a batch, int32 [T]."""
    return blake2b(token_ids.tobytes(), digest_size=16).hexdigest()
