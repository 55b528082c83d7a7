"""Streaming access to Hugging Face safetensors checkpoints.

Reading maps the files and copies only the rows or columns asked for; writing holds one shard at a time.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dapo_megatron.checkpoint import INDEX, SINGLE
from dapo_megatron.errors import UserError
from dapo_megatron.files import fsync

MAX_SHARD_BYTES = 4 << 30


class HFReader:
    """Reads stretches of the tensors in a checkpoint folder. Usable as a `models.sharding.Reader`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, safe_open] = {}
        self._file_of: dict[str, str]
        index = self.folder / INDEX
        if index.exists():
            self._file_of = _weight_map(index)
        elif (self.folder / SINGLE).exists():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise UserError(f"model.path: {self.folder} has neither {SINGLE} nor {INDEX}")

    def _open(self, file: str) -> safe_open:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"model.path: {self.folder / file} cannot be read: {error}") from None
        return self._files[file]

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor `name`, or its stretch [start, stop) along `dim` 0 or 1, contiguous, in the dtype of the file.

        Raises:
            UserError: if the checkpoint has no such tensor, or its file is missing or damaged.
        """
        whole = self._holder(name).get_slice(name)
        stretch: Tensor = whole[:, start:stop] if dim == 1 else whole[start:stop] if dim == 0 else whole[:]
        return stretch.contiguous()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises as reading it does."""
        return tuple(self._holder(name).get_slice(name).get_shape())

    def _holder(self, name: str) -> safe_open:
        """The open file that holds a tensor."""
        if name not in self._file_of:
            raise UserError(f"model.path: {self.folder} has no tensor {name}")
        file = self._open(self._file_of[name])
        if name not in file.keys():  # noqa: SIM118  (it is no dict)
            raise UserError(f"model.path: {self.folder / self._file_of[name]} lacks {name}, which {INDEX} places there")
        return file


def _weight_map(index: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.path: {index} is not an index of safetensors files: {error!r}") from None
    return weight_map


def write_hf(
    folder: str | Path,
    template: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face checkpoint: `tensors` as they come, everything else as in `template`.

    Args:
        folder: where the checkpoint goes. It appears complete or not at all; an older one is replaced.
        template: checkpoint folder whose config, tokenizer and generation files are copied.
        tensors: (name, tensor) pairs; each is held only until its shard is written.
        max_shard_bytes: a new file is begun when the next tensor would exceed this size.
    """
    folder = Path(folder)
    beside = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    shards, dtype = _write_shards(beside, tensors, max_shard_bytes)
    _name_shards(beside, shards)
    _copy_rest(Path(template), beside, dtype)
    for file in beside.iterdir():
        fsync(file)
    fsync(beside)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> tuple[list[dict[str, int]], torch.dtype]:
    """Write part-0.safetensors, part-1...; returns bytes per tensor name for each part, and the first dtype."""
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    dtype: torch.dtype | None = None

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        dtype = dtype or tensor.dtype
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > max_bytes:
            flush()
        pending[name] = tensor.detach().cpu().contiguous()
    if dtype is None:
        raise ValueError("write_hf: there are no tensors to write")
    flush()
    return shards, dtype


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Give the parts their final names and write the index, where there is more than one."""
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(sum(shard.values()) for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_rest(template: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy every file of `template` that is not a weight; config.json states the dtype written."""
    for file in sorted(template.iterdir()):
        if file.is_file() and file.suffix not in {".safetensors", ".bin", ".pt"} and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
