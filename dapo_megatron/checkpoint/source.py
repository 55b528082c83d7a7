"""What a conversion reads: whole Megatron parameters, from a Hugging Face folder or from a Megatron checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from dapo_megatron.models.parameters import EMBEDDING, Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.sharding import load_shard
from dapo_megatron.models.table import parameter_table

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


class HFSource:
    """A Hugging Face folder, checked as a whole before anything is converted.

    Attributes:
        copies: tensors that only repeat another one (tied embeddings stored twice): {name: name of the other}.

    Raises:
        UserError: if a tensor is missing, has another shape than config.json says, has a dtype that cannot be trained,
            or is not known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.arch, self.reader = folder, architecture_of(folder), HFReader(folder)
        self.known: Mapping[str, TensorRecord] = {}
        self.copies: dict[str, str] = {}
        names = set(self.reader.names())
        table = list(parameter_table(self.arch, extra=True))
        self._items = [Item("", row) for row in table if not row.extra or not names.isdisjoint(row.hf_names)]
        known = {name for item in self._items for name in item.row.hf_names}
        for name in sorted(names - known):
            self._account_for(name, table)
        dtypes: dict[str, tuple[str, torch.dtype]] = {}
        for item in self._items:
            for name, shape in zip(item.row.hf_names, item.row.rule.hf_shapes, strict=True):
                found = self.reader.shape(name)  # stretches of a tensor that is too large would fit
                if found != shape:
                    raise UserError(f"{folder}: {name} has the shape {found}, but config.json asks for {shape}")
                key = stored_parameter(item.row, self.arch).key
                self._check_dtype(name, *dtypes.setdefault(key, (name, self.reader.dtype(name))))

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

    def _check_dtype(self, name: str, first: str, expected: torch.dtype) -> None:
        dtype = self.reader.dtype(name)
        if dtype not in DTYPES.values():
            raise UserError(
                f"{self.folder}: {name} is {dtype}; only {', '.join(DTYPES)} can be converted: quantised checkpoints "
                "must be dequantised first"
            )
        if dtype != expected:
            raise UserError(
                f"{self.folder}: {name} is {dtype}, but {first} is {expected}: Megatron keeps both in one tensor"
            )

    def items(self) -> Sequence[Item]:
        """The weights, in the order of a forward pass."""
        return self._items

    def dtype(self, item: Item) -> torch.dtype:
        """As in the files."""
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
    """

    def __init__(self, checkpoint: MegatronCheckpoint, *, weights_only: bool) -> None:
        self.checkpoint, self.folder, self.arch = checkpoint, checkpoint.folder, checkpoint.arch
        self.known: Mapping[str, TensorRecord] = {}
        if (self.folder / MANIFEST).exists():
            self.known = read_manifest(self.folder).tensors
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
        return whole, self.checkpoint.tensors(item.row, whole)
