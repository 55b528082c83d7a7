"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import os
import shutil
from pathlib import Path


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, flush, rename."""
    beside = path.with_name(path.name + ".incomplete")
    beside.write_bytes(content)
    fsync(beside)
    beside.rename(path)
    fsync(path.parent)


def replace_folder(folder: Path, beside: Path) -> None:
    """Give `beside`, a complete folder in the same parent, the name `folder`. One that has it stays until then."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
