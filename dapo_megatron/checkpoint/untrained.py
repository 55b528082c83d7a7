"""Tensors that a trainer leaves out of its model (multi-token prediction), from the folder that it started from.

A converted checkpoint has all that its source had; the state of a run has not, and neither has what is made of it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoint.manifest import MANIFEST, read_manifest, record
from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.checkpoint.source import check_dtype, extra_layers, held_of_layer, is_copy, known_tensors
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.errors import UserError, renamed_keys
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.run_state.store import RUN, read_run


def missing_layers(arch: Architecture, held: Iterable[Parameter]) -> list[list[Parameter]]:
    """The layers for multi-token prediction of which a checkpoint with the rows `held` has none, as rows of each."""
    names = {row.name for row in held}
    return [layer for layer in extra_layers(arch) if names.isdisjoint(row.name for row in layer)]


def base_of(folder: Path) -> Path | None:
    """Where a checkpoint says that the tensors are which training left out of it.

    Raises:
        UserError: if it is the state of a run that does not say what that started from.
    """
    if (folder / RUN).exists():
        return Path(read_run(folder, "model_path")["model_path"])
    base = read_manifest(folder).base if (folder / MANIFEST).exists() else ""
    return Path(base) if base else None


class Untrained:
    """The tensors of layers that a checkpoint lacks.

    Args:
        layers: what `missing_layers` gave.
        base: the folder that has them; None where there is none. A layer of which it has nothing is looked for where
            its own training started, and so on: a model may have been published without.
        cast: dtype of the tensors, but for buffers; as they are where None.
        needed: `base` itself must have all.

    Attributes:
        entries: what there is.

    Raises:
        UserError: if a folder is not there, holds a part of a layer, or holds tensors of other shapes or dtypes that
            cannot be converted.
    """

    def __init__(
        self, layers: list[list[Parameter]], base: Path | None, cast: torch.dtype | None, *, needed: bool = False
    ) -> None:
        self.entries: list[Entry] = []
        if not layers or base is None:
            return
        self._folder, rows = _find(layers, base, needed=needed)
        self._reader, self._known = open_weights(self._folder), known_tensors(self._folder)
        for row in rows:
            for name, shape in zip(row.hf_names, row.rule.hf_shapes, strict=True):
                found, dtype = self._reader.shape(name), self._reader.dtype(name)
                if found != shape:
                    raise UserError(f"{self._folder}: {name} has the shape {found}, but the model needs {shape}")
                check_dtype(self._folder, name, dtype)
                self.entries.append(Entry(name, (not row.is_buffer and cast) or dtype, shape))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each entry.

        Raises:
            UserError: if one is not what a manifest beside it says.
        """
        for entry in self.entries:
            tensor = self._reader(entry.name)
            if entry.name in self._known and record(tensor) != self._known[entry.name]:
                raise UserError(f"{self._folder} is damaged: {entry.name} is not what its {MANIFEST} says")
            yield entry.name, tensor.to(entry.dtype)


def _find(layers: list[list[Parameter]], base: Path, *, needed: bool) -> tuple[Path, list[Parameter]]:
    """The first folder, from `base` on, that has some of the layers (the last where none has), and their rows."""
    visited: list[Path] = []
    folder = base
    while True:
        visited.append(folder)
        rows = _held(layers, folder, needed=needed)
        older = None if rows or needed else base_of(folder)
        if older is None or older in visited:
            return folder, rows
        folder = older


def _held(layers: list[list[Parameter]], folder: Path, *, needed: bool) -> list[Parameter]:
    """The rows of the layers that a folder has."""
    if not folder.is_dir():
        tensor = _first_tensor(layers[0])
        raise UserError(
            f"--base: {folder}, which should have {tensor}, is not a folder"
            if needed
            else f"{tensor} is in no checkpoint of this training, which leaves it as it is, and {folder} is not here: "
            "export with --base DIR, a folder that has it"
        )
    with renamed_keys({"model.path": "--base"} if needed else {}):
        names = set(open_weights(folder).names())
    rows = []
    for layer in layers:
        held = held_of_layer(folder, layer, names)
        if needed and not held:
            raise UserError(f"--base: {folder} has no tensor {_first_tensor(layer)}")
        rows += held
    return rows


def _first_tensor(layer: list[Parameter]) -> str:
    return next(row.hf_names[0] for row in layer if not is_copy(row))
