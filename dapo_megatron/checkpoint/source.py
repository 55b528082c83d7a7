"""What a conversion reads: whole Megatron parameters, from a Hugging Face folder or from a Megatron checkpoint."""

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.manifest import MANIFEST, TensorRecord, read_manifest
from dapo_megatron.checkpoint.megatron import MegatronCheckpoint
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.checkpoint_keys import stored_parameter
from dapo_megatron.models.parameters import EMBEDDING, OUTPUT, Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.sharding import load_shard, merge_shards
from dapo_megatron.models.table import parameter_table
from dapo_megatron.run_state.store import RUN, verify

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Buffers that old checkpoints store and every library computes again.
COMPUTED = (".rotary_emb.inv_freq",)
_TIED = "lm_head.weight"


@dataclass(frozen=True)
class Item:
    """One thing to convert: the tensor of a kind ("" for weights, or an optimizer state's prefix) of a parameter."""

    prefix: str
    row: Parameter

    @property
    def name(self) -> str:
        """Its name in a journal."""
        return self.prefix + self.row.name

    @property
    def tensor_names(self) -> list[str]:
        """Names of its tensors in a manifest."""
        return [self.prefix + name for name in self.row.hf_names]


class Source(Protocol):
    """Where whole parameters come from.

    `known` is what a manifest beside them says of tensors.
    """

    folder: Path
    arch: Architecture
    known: Mapping[str, TensorRecord]

    def items(self) -> Sequence[Item]:
        """All that is there."""

    def dtype(self, item: Item) -> torch.dtype:
        """The dtype of an item's tensors."""

    def read(self, item: Item) -> tuple[Tensor, list[Tensor]]:
        """The whole parameter, and the Hugging Face tensors it is made of."""


def known_tensors(folder: Path) -> Mapping[str, TensorRecord]:
    """What the manifest of a folder says of its tensors; nothing where there is none."""
    return read_manifest(folder).tensors if (folder / MANIFEST).exists() else {}


def verify_state(folder: Path) -> None:
    """Compare every file of a run's saved state, its critic's included, with the state's checksums.

    On the first process alone; other folders, which have no such checksums, pass.

    Raises:
        UserError: naming the first file that is damaged.
    """
    if (folder / RUN).exists() and not int(os.environ.get("RANK", 0)):
        verify(folder)


def check_dtype(folder: Path, name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor that cannot be converted, such as a quantised one."""
    if dtype not in DTYPES.values():
        raise UserError(
            f"{folder}: {name} is {dtype}; only {', '.join(DTYPES)} can be converted: quantised checkpoints must be "
            "dequantised first"
        )


def extra_layers(arch: Architecture) -> list[list[Parameter]]:
    """The rows that are not trained, layer by layer."""
    rows = (row for row in parameter_table(arch, extra=True) if row.extra)
    return [list(layer) for _, layer in groupby(rows, lambda row: row.name.split(".")[:3])]


def is_copy(row: Parameter) -> bool:
    """Whether a row of a layer for multi-token prediction only repeats the model's embedding or output layer."""
    return row.extra and row.name.endswith((EMBEDDING, OUTPUT))


def held_of_layer(folder: Path, layer: Iterable[Parameter], names: Container[str]) -> list[Parameter]:
    """The rows of a layer for multi-token prediction that a folder with the tensors `names` has: none, or all.

    Copies of embedding and output layer may be absent.

    Raises:
        UserError: if a part of the layer is missing.
    """
    rows = list(layer)
    held = [row for row in rows if any(name in names for name in row.hf_names)]
    for row in rows if held else ():
        lacking = [name for name in row.hf_names if name not in names]
        if lacking and not is_copy(row):
            raise UserError(f"{folder} lacks {lacking[0]}, but holds {held[0].hf_names[0]} of the same layer")
    return held


class HFSource:
    """A Hugging Face folder, checked as a whole before anything is converted.

    Args:
        folder: it.
        cast: what weights are converted to; where it is None, those that Megatron keeps in one tensor must be alike.

    Attributes:
        copies: tensors that only repeat another one (tied embeddings stored twice): {name: name of the other}.

    Raises:
        UserError: if a tensor is missing, has another shape than config.json says, has a dtype that cannot be trained,
            or is not known.
    """

    def __init__(self, folder: Path, *, cast: torch.dtype | None = None) -> None:
        self.folder, self.arch, self.reader = folder, architecture_of(folder), HFReader(folder)
        self.known = known_tensors(folder)
        self.copies: dict[str, str] = {}
        names = set(self.reader.names())
        table = list(parameter_table(self.arch, extra=True))
        rows = [row for row in table if not row.extra]
        for layer in extra_layers(self.arch):
            rows += held_of_layer(folder, layer, names)
        self._items = [Item("", row) for row in rows]
        known = {name for row in rows for name in row.hf_names}
        for name in sorted(names - known):
            self._account_for(name, table)
        dtypes: dict[str, tuple[str, torch.dtype]] = {}
        for row in rows:
            for name, shape in zip(row.hf_names, row.rule.hf_shapes, strict=True):
                found, dtype = self.reader.shape(name), self.reader.dtype(name)
                if found != shape:  # stretches of a tensor that is too large would fit
                    raise UserError(f"{folder}: {name} has the shape {found}, but config.json asks for {shape}")
                check_dtype(folder, name, dtype)
                first, expected = dtypes.setdefault(stored_parameter(row, self.arch).key, (name, dtype))
                if dtype != expected and (cast is None or row.is_buffer):
                    way_out = "" if row.is_buffer else ": choose one for both with --dtype"
                    raise UserError(
                        f"{folder}: {name} is {dtype}, but {first} is {expected}, and Megatron keeps both in one "
                        f"tensor{way_out}"
                    )

    def _account_for(self, name: str, table: Sequence[Parameter]) -> None:
        """Refuse a tensor that no parameter is made of, unless nothing is lost with it."""
        if name.endswith(COMPUTED):
            return
        if name == _TIED and self.arch.tied_embeddings:
            original = next(row for row in table if row.name == EMBEDDING).hf_names[0]
            if not torch.equal(self.reader(name), self.reader(original)):
                raise UserError(
                    f"{self.folder}: config.json says tie_word_embeddings, but {name} differs from {original}: correct "
                    "the one or remove the other"
                )
            self.copies[name] = original
            return
        raise UserError(f"{self.folder} holds {name}, which {self.arch.hf_class} has no place for: it would be lost")

    def items(self) -> Sequence[Item]:
        """The weights, in the order of a forward pass."""
        return self._items

    def dtype(self, item: Item) -> torch.dtype:
        """As in the files; of tensors that are not alike, the first's."""
        return self.reader.dtype(item.row.hf_names[0])

    def read(self, item: Item) -> tuple[Tensor, list[Tensor]]:
        """Both from one reading of the files."""
        tensors = {name: self.reader(name) for name in item.row.hf_names}
        return load_shard(item.row.rule, _Held(tensors), item.row.hf_names, 0, 1), list(tensors.values())


@dataclass(frozen=True)
class _Held:
    """Tensors in memory, as a `models.sharding.Reader`."""

    tensors: dict[str, Tensor]

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        return self.tensors[name] if dim is None else self.tensors[name].narrow(dim, start, stop - start)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


class MegatronSource:
    """A Megatron checkpoint.

    Args:
        checkpoint: it.
        weights_only: without the states of an optimizer.

    Raises:
        UserError: if a part of a layer for multi-token prediction is missing.
    """

    def __init__(self, checkpoint: MegatronCheckpoint, *, weights_only: bool) -> None:
        self.checkpoint, self.folder, self.arch = checkpoint, checkpoint.folder, checkpoint.arch
        self.known = known_tensors(self.folder)
        names = {name for row in checkpoint.rows for name in row.hf_names}
        for layer in extra_layers(self.arch):
            held_of_layer(self.folder, layer, names)
        prefixes = [""] if weights_only else checkpoint.prefixes
        self._items = [
            Item(prefix, row) for prefix in prefixes for row in checkpoint.rows if checkpoint.has(row, prefix)
        ]

    def items(self) -> Sequence[Item]:
        """Weights first."""
        return self._items

    def dtype(self, item: Item) -> torch.dtype:
        """As in the files."""
        return self.checkpoint.dtype(item.row, item.prefix)

    def read(self, item: Item) -> tuple[Tensor, list[Tensor]]:
        """Both from one reading of the files."""
        whole = self.checkpoint.whole(item.row, item.prefix)
        return whole, merge_shards(item.row.rule, [whole])
