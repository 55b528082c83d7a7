"""Hugging Face checkpoints: folders of safetensors files, read and written tensor by tensor, in any order."""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.checkpoint import INDEX, SINGLE
from dapo_megatron.checkpoint.raw import disk_errors
from dapo_megatron.checkpoint.safetensors_file import (
    Entry,
    Layout,
    SafetensorsFile,
    layout,
    write_header,
    write_tensor,
)
from dapo_megatron.errors import UserError
from dapo_megatron.files import fsync, replace_folder

MAX_SHARD_BYTES = 4 << 30

_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp", ".incomplete"}
_OTHERS = {".metadata", "metadata.json", "tensors.json", "manifest.json", "run.json"}  # of Megatron checkpoints


class HFReader:
    """Reads stretches of the tensors in a checkpoint folder. Usable as a `models.sharding.Reader`.

    All files are opened and checked at once, against the index where there is one.

    Raises:
        UserError: if the folder holds no weights, a file is missing or damaged, or files and index differ.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.exists():
            listed = _weight_map(index)
            self._files = {file: self._open(file) for file in sorted(set(listed.values()))}
            self._check(listed)
        elif (self.folder / SINGLE).exists():
            self._files = {SINGLE: self._open(SINGLE)}
        else:
            raise UserError(f"model.path: {self.folder} has neither {SINGLE} nor {INDEX}")
        self._holder = {name: file for file in self._files.values() for name in file.entries}

    def __call__(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The tensor `name`, or its stretch [start, stop) along `dim`, contiguous, in the dtype of the file.

        Raises:
            UserError: if the checkpoint has no such tensor, or not that stretch of it.
        """
        self.entry(name)
        try:
            return self._holder[name].read(name, dim, start, stop)
        except UserError as error:
            raise UserError(f"model.path: {error}") from None

    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        return list(self._holder)

    def entry(self, name: str) -> Entry:
        """Dtype and shape of a tensor. Raises UserError where there is none of that name."""
        if name not in self._holder:
            raise UserError(f"model.path: {self.folder} has no tensor {name}")
        return self._holder[name].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises as reading it does."""
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor in the file. Raises as reading it does."""
        return self.entry(name).dtype

    def _open(self, file: str) -> SafetensorsFile:
        try:
            return SafetensorsFile(self.folder / file)
        except UserError as error:
            raise UserError(f"model.path: {error}") from None

    def _check(self, listed: dict[str, str]) -> None:
        """Compare the index with the files it names."""
        for name, file in listed.items():
            if name not in self._files[file].entries:
                raise UserError(f"model.path: {self.folder / file} lacks {name}, which {INDEX} places there")
        for file, opened in self._files.items():
            for name in opened.entries:
                if listed.get(name) != file:
                    raise UserError(
                        f"model.path: {self.folder / file} holds {name}, which {INDEX} does not place there"
                    )


class HFWriter:
    """Writes the weights of a checkpoint into `folder`, in any order and from any number of processes.

    Each process makes its own with the same arguments. One calls `create` before any `write`, and `finish` after the
    last. A file that is made but not yet filled looks whole: the folder should get its final name after `finish`.

    Args:
        folder: where the files go.
        entries: all tensors; the files hold them in this order, none is split.
        max_shard_bytes: a new file is begun when the next tensor would exceed this size.

    Raises:
        ValueError: if there are no tensors, a name is given twice or a dtype cannot be stored.
    """

    def __init__(self, folder: str | Path, entries: Sequence[Entry], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder = Path(folder)
        self.entries = {entry.name: entry for entry in entries}
        if not entries:
            raise ValueError("there are no tensors to write")
        if len(self.entries) < len(entries):
            raise ValueError("a tensor is given twice")
        shards = _shards(entries, max_shard_bytes)
        self.files = {_file_name(i, len(shards)): shard for i, shard in enumerate(shards)}
        self.file_of = {entry.name: file for file, shard in self.files.items() for entry in shard}
        self._layouts = {file: layout(shard) for file, shard in self.files.items()}

    def create(self) -> None:
        """Make the files, at their final size and without the tensors.

        A file of this very layout is left as it is, with what was written into it: a conversion that goes on. Weight
        files of another plan are removed.

        Raises:
            UserError: if the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if _SHARD.fullmatch(path.name) and path.name not in self.files:
                path.unlink()
        for file in self.missing():
            write_header(self.folder / file, self.files[file])

    def missing(self) -> list[str]:
        """The files that `create` would make."""
        return [file for file in self.files if not _has_layout(self.folder / file, self._layouts[file])]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device.

        Raises:
            UserError: if the disk is full.
            ValueError: if there is no such entry, or it has another dtype or shape.
        """
        found = Entry(name, tensor.dtype, tuple(tensor.shape))
        if self.entries.get(name) != found:
            raise ValueError(f"{found} is to be written, the plan has {self.entries.get(name)}")
        file = self.file_of[name]
        write_tensor(self.folder / file, self._layouts[file].offsets[name], tensor)

    def finish(self, template: str | Path, dtype: torch.dtype) -> None:
        """Write the index and everything else of the checkpoint; flush all to the disk.

        Args:
            template: checkpoint folder whose config, tokenizer and generation files are copied.
            dtype: what config.json is to state.

        Raises:
            UserError: if the template has no readable config.json, or the disk is full.
        """
        if len(self.files) > 1:
            total = sum(entry.nbytes for entry in self.entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self.file_of.items()))}
            _write_text(self.folder / INDEX, json.dumps(index, indent=2) + "\n")
        else:
            (self.folder / INDEX).unlink(missing_ok=True)
        copy_without_weights(template, self.folder)
        quantised = any(entry.dtype.itemsize == 1 for entry in self.entries.values())
        _write_text(self.folder / "config.json", _config(Path(template), dtype, quantised=quantised))
        for path in self.folder.iterdir():
            fsync(path)
        fsync(self.folder)

    def flush(self) -> None:
        """Put all that was written so far, by this process or another of this machine, on the disk."""
        for file in self.files:
            fsync(self.folder / file)


def write_hf(
    folder: str | Path,
    template: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    entries: Sequence[Entry],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face checkpoint: `tensors` as they come, everything else as in `template`.

    Args:
        folder: where the checkpoint goes. It appears complete or not at all; an older one is replaced.
        template: checkpoint folder whose config, tokenizer and generation files are copied.
        tensors: (name, tensor) pairs, every entry's once; none is held after it is written.
        entries: what `tensors` yields. config.json states the dtype of the first.
        max_shard_bytes: a new file is begun when the next tensor would exceed this size.

    Raises:
        UserError: if the disk is full or the template has no config.
        ValueError: if tensors and entries differ.
    """
    folder = Path(folder)
    beside = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(beside, ignore_errors=True)
    writer = HFWriter(beside, entries, max_shard_bytes)
    writer.create()
    missing = set(writer.entries)
    for name, tensor in tensors:
        writer.write(name, tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"{len(missing)} tensors were planned and not written, among them {min(missing)}")
    writer.finish(template, entries[0].dtype)
    replace_folder(folder, beside)


def _weight_map(index: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
        if not weight_map or any(Path(file).name != file for file in weight_map.values()):
            raise ValueError("weight_map should give a file of this folder for each tensor")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.path: {index} is not an index of safetensors files: {error!r}") from None
    return weight_map


def _shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Entries of each file."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _file_name(i: int, count: int) -> str:
    """Name of file `i` of `count`, as Hugging Face gives it."""
    return SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _has_layout(path: Path, planned: Layout) -> bool:
    """Whether a file of this size and with this header is there."""
    if not path.exists() or path.stat().st_size != planned.size:
        return False
    with path.open("rb") as file:
        return file.read(len(planned.header)) == planned.header


def _write_text(path: Path, text: str) -> None:
    with disk_errors(path):
        path.write_text(text)


def files_without_weights(folder: str | Path) -> list[Path]:
    """The files of a checkpoint folder that belong to no weights: config, tokenizer, generation settings."""
    files = (file for file in sorted(Path(folder).iterdir()) if file.is_file())
    return [file for file in files if not (_WEIGHTS & set(file.suffixes) or file.name in _OTHERS)]


def copy_without_weights(template: str | Path, folder: str | Path, *, but: Collection[str] = ()) -> None:
    """Copy the `files_without_weights` of a checkpoint folder, but those of some names.

    Raises:
        UserError: if the disk is full.
    """
    for file in files_without_weights(template):
        if file.name not in but:
            with disk_errors(Path(folder) / file.name):
                shutil.copyfile(file, Path(folder) / file.name)


def _config(template: Path, dtype: torch.dtype, *, quantised: bool) -> str:
    """The template's config.json; it states the dtype written, and no quantisation where there is none."""
    path = template / "config.json"
    try:
        config = json.loads(path.read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not quantised:
        config.pop("quantization_config", None)
    return json.dumps(config, indent=2) + "\n"
