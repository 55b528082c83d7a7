"""The manifest of a checkpoint: every tensor with shape, dtype and checksum, in Hugging Face's names and shapes.

A checkpoint has the same manifest in every format and layout, so that two of them can be compared by it. It is the
file `tensors.json` of every folder that a conversion has written.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_megatron.checkpoint.raw import as_bytes, disk_errors
from dapo_megatron.errors import UserError

MANIFEST = "tensors.json"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: its shape, dtype ("float32") and the SHA-256 of its bytes, little-endian and contiguous."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass
class Manifest:
    """All tensors of a checkpoint.

    Attributes:
        tensors: by name. Optimizer states stand under their Megatron prefix and the name of the weight.
        copies: tensors that are stored under a second name: {name: the name it is a copy of}.
        layout: the parallel layout whose ranks' shards the files hold; empty for Hugging Face folders.
        base: where tensors are that training left out of the checkpoint, see `untrained.py`; "" where none were.
    """

    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    base: str = ""

    def in_files(self) -> dict[str, TensorRecord]:
        """The tensors of a Hugging Face folder, copies included."""
        return self.tensors | {copy: self.tensors[name] for copy, name in self.copies.items()}

    def write(self, folder: Path) -> None:
        """Put it into a folder. Raises UserError if the disk is full."""
        with disk_errors(folder / MANIFEST):
            (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")


def record(tensor: Tensor) -> TensorRecord:
    """What a manifest says of a tensor on the CPU."""
    return TensorRecord(
        tuple(tensor.shape), dtype_name(tensor.dtype), hashlib.sha256(as_bytes(tensor.contiguous())).hexdigest()
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", "bfloat16"..."""
    return str(dtype).removeprefix("torch.")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises:
        UserError: if there is none or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        tensors = {
            name: TensorRecord(tuple(entry["shape"]), entry["dtype"], entry["sha256"])
            for name, entry in content["tensors"].items()
        }
        return Manifest(tensors, dict(content["copies"]), dict(content["layout"]), content.get("base", ""))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {MANIFEST}: only a folder that a conversion has written can be verified"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a manifest of tensors: {error!r}") from None


def verify_tensors(
    folder: Path, expected: Mapping[str, TensorRecord], read: Callable[[str], Tensor], names: Iterable[str]
) -> None:
    """Read every tensor of a checkpoint and compare it with what a manifest says.

    Args:
        folder: how messages call the checkpoint.
        expected: what must be there.
        read: gives a tensor by its name.
        names: what is there.

    Raises:
        UserError: naming the first tensor that is missing, not expected, or differs.
    """
    there = set(names)
    if there != expected.keys():
        missing, more = sorted(expected.keys() - there), sorted(there - expected.keys())
        what = f"lacks {missing[0]}" if missing else f"has {more[0]}, which the manifest does not know"
        raise UserError(f"{folder} is not what was written: it {what}")
    for name, entry in expected.items():
        found = record(read(name))
        if found != entry:
            raise UserError(f"{folder} is not what was written: {name} is {found}, {MANIFEST} says {entry}")
