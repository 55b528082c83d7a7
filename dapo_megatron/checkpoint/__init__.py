"""Checkpoints in Hugging Face's and in Megatron's form, read and written tensor by tensor. Importing this package loads
no torch.
"""

import os
from pathlib import Path

SINGLE = "model.safetensors"  # all weights, where one file is enough
INDEX = "model.safetensors.index.json"  # else: which file holds which tensor

# Of every distributed checkpoint of Megatron, beside its `*.distcp`.
MEGATRON_FILES = (".metadata", "metadata.json", "common.pt")


def is_megatron(folder: str | Path) -> bool:
    """Whether a folder holds Megatron's distributed checkpoint, complete or not, in place of safetensors."""
    folder = Path(folder)
    return (folder / MEGATRON_FILES[0]).exists() or any(folder.glob("*.distcp"))


def use_large_pages() -> None:
    """Let torch put large tensors into pages of 2 MB, where Linux has them. Before its first tensor of this process.

    A conversion goes through fresh memory all the time, and half of its system time went into 4 KB pages.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
