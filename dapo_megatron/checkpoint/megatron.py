"""Reading a Megatron checkpoint (converted, or a run's saved state) in terms of Hugging Face tensors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.manifest import MANIFEST, read_manifest
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.checkpoint_keys import stored_parameter
from dapo_megatron.models.parameters import EMBEDDING, OUTPUT, Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.rules import Replicated, Rule, Stretch
from dapo_megatron.models.sharding import assemble, merge_shards
from dapo_megatron.models.table import parameter_table

_BUCKETS = ".distributed.dp_group_idx_"  # in the keys of dp_reshardable optimizer states


CRITIC = "critic"  # the folder of a critic's checkpoint in a run's state


def critic_table(arch: Architecture) -> Iterator[Parameter]:
    """The rows of a critic that grew out of a model: a head for one value in place of the output layer."""
    yield from parameter_table(replace(arch, tied_embeddings=True))
    yield Parameter(OUTPUT, ("value_head.weight",), Replicated((1, arch.hidden_size)))


class MegatronCheckpoint:
    """Whole parameters of a Megatron checkpoint, whatever the layout it was written in.

    Args:
        folder: the checkpoint, with the model's config.json in it.
        critic_of: for the checkpoint of a critic, which has no config.json, the model that it grew out of.

    Attributes:
        arch: the model.
        rows: the parameters that the checkpoint holds; those that are not trained may be absent.
        prefixes: what stands before the keys of each kind of tensor: "" for the weights, which come first, and one for
            every optimizer state (fp32 weights and moments).
        bucketed: whether optimizer states lie there as in the ranks' buffers, of use in the same layout only.

    Raises:
        UserError: if the folder is no such checkpoint, is damaged, or is one of another model.
    """

    def __init__(self, folder: str | Path, *, critic_of: Architecture | None = None) -> None:
        self.folder = Path(folder)
        self.arch: Architecture = critic_of or architecture_of(folder)
        self.files = DistReader(self.folder)
        keys = self.files.tensors.keys()
        table = critic_table(self.arch) if critic_of else parameter_table(self.arch, extra=True)
        self.rows = [row for row in table if self._key(row) in keys or not row.extra]
        self._check()
        self.bucketed = any(_BUCKETS in key for key in keys)
        plain = {self._key(row) for row in self.rows}
        prefixes = set()
        for key in sorted(key for key in keys if _BUCKETS not in key):
            suffix = next((suffix for suffix in self._suffixes(key) if suffix in plain), None)
            if suffix is None:
                raise UserError(f"{self.folder} holds {key}, which {self.arch.hf_class} has no place for")
            prefixes.add(key.removesuffix(suffix))
        self.prefixes = sorted(prefixes)

    def _check(self) -> None:
        """Every weight is there, in the model's shape; only the vocabulary may be padded."""
        for row in self.rows:
            stored = stored_parameter(row, self.arch)
            if stored.key not in self.files.tensors:
                raise UserError(f"{self.folder} lacks {stored.key} of {self.arch.hf_class}")
            shape, _ = self.files.tensors[stored.key]
            own = shape[len(stored.stack) :]
            may_be_padded = row.rule.split and row.name.endswith((EMBEDDING, OUTPUT))
            padded = may_be_padded and own[:1] > row.rule.shape[:1] and own[1:] == row.rule.shape[1:]
            if shape[: len(stored.stack)] != stored.stack or not (own == row.rule.shape or padded):
                raise UserError(
                    f"{self.folder}: {stored.key} has the shape {tuple(shape)}, but config.json asks for "
                    f"{(*stored.stack, *row.rule.shape)}"
                )

    def _key(self, row: Parameter) -> str:
        return stored_parameter(row, self.arch).key

    @staticmethod
    def _suffixes(key: str) -> Iterator[str]:
        """The key itself, and what is left of it when names before dots are taken away."""
        while key:
            yield key
            key = key.partition(".")[2]

    def has(self, row: Parameter, prefix: str) -> bool:
        """Whether the parameter has a tensor of this kind: not every optimizer knows every parameter."""
        return prefix + self._key(row) in self.files.tensors

    def dtype(self, row: Parameter, prefix: str = "") -> torch.dtype:
        """The dtype of a parameter's tensor."""
        return self.files.tensors[prefix + self._key(row)][1]

    def whole(self, row: Parameter, prefix: str = "") -> Tensor:
        """A whole parameter, without padding and stacked dimensions."""
        stored = stored_parameter(row, self.arch)
        shape = row.rule.shape
        offset = (*stored.index, *(0 for _ in shape))
        return self.files.read(prefix + stored.key, offset, (*(1 for _ in stored.index), *shape)).reshape(shape)


class MegatronReader:
    """The weights of a Megatron checkpoint under Hugging Face's names. Usable as a `models.sharding.Reader`.

    Stretches along the dimension in which a parameter is shared are read without the rest.
    """

    def __init__(self, folder: str | Path) -> None:
        self.checkpoint = MegatronCheckpoint(folder)
        self._place = {name: (row, i) for row in self.checkpoint.rows for i, name in enumerate(row.hf_names)}
        if (self.checkpoint.folder / MANIFEST).exists():
            copies = read_manifest(self.checkpoint.folder).copies
            self._place |= {copy: self._place[name] for copy, name in copies.items()}
        self._last: tuple[str, list[Tensor]] | None = None  # q, k and v are asked for one after the other

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        row, i = self._find(name)
        return row.rule.hf_shapes[i]

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        return self.checkpoint.dtype(self._find(name)[0])

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor `name`, or its stretch [start, stop) along `dim`, contiguous.

        Raises:
            UserError: if the checkpoint has no such tensor, or its file is missing or damaged.
        """
        row, i = self._find(name)
        if dim is not None and dim == row.rule.dim:
            parts = [self._box(row, dim, *stretch) for stretch in _places(row.rule, i, start, stop)]
            return assemble(row.rule, parts)
        if self._last is None or self._last[0] != row.name:
            self._last = (row.name, merge_shards(row.rule, [self.checkpoint.whole(row)]))
        tensor = self._last[1][i]
        return (tensor if dim is None else tensor.narrow(dim, start, stop - start)).contiguous()

    def _box(self, row: Parameter, dim: int, start: int, stop: int) -> Tensor:
        stored = stored_parameter(row, self.checkpoint.arch)
        offset, shape = [0] * len(row.rule.shape), list(row.rule.shape)
        offset[dim], shape[dim] = start, stop - start
        box = (*(1 for _ in stored.index), *shape)
        return self.checkpoint.files.read(stored.key, (*stored.index, *offset), box).reshape(shape)

    def _find(self, name: str) -> tuple[Parameter, int]:
        if name not in self._place:
            raise UserError(f"model.path: {self.checkpoint.folder} has no tensor {name}")
        return self._place[name]


def _places(rule: Rule, source: int, start: int, stop: int) -> list[Stretch]:
    """Where the stretch [start, stop) of a Hugging Face tensor lies in the parameter that it is fused into."""
    places, at = [], 0
    for piece in rule.pieces(0, 1):
        first, last = max(start, piece.start), min(stop, piece.stop)
        if piece.source == source and (first < last or start == stop):
            places.append((at + first - piece.start, at + max(first, last) - piece.start))
        at += piece.stop - piece.start
    return places[:1] if start == stop else places
