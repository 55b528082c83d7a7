"""What a checkpoint folder holds: format, model, layout, step and tensors."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from dapo_megatron.checkpoint import is_megatron
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.manifest import MANIFEST, dtype_name, read_manifest
from dapo_megatron.checkpoint.megatron import CRITIC, MegatronCheckpoint
from dapo_megatron.models.registry import read_hf_config
from dapo_megatron.run_state.store import RUN, read_run

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the number of experts in a config.json

Row = tuple[str, tuple[int, ...], str, int]
"""A tensor: name, shape, dtype, and in how many pieces it is stored."""


def inspect(folder: Path, console: Console) -> None:
    """Print what a Hugging Face folder or a Megatron checkpoint holds. Tensors that differ by numbers share a line.

    Raises:
        UserError: if it is no checkpoint, or is damaged.
    """
    facts: dict[str, Any] = {"folder": folder} | _model(read_hf_config(folder))
    if is_megatron(folder):
        checkpoint = MegatronCheckpoint(folder)
        facts["format"] = "Megatron distributed checkpoint (torch_dist)"
        facts |= _layout(folder)
        states = [prefix for prefix in checkpoint.prefixes if prefix]
        kept = ", ".join(prefix.rstrip(".") for prefix in states) or "none"
        facts["optimizer states"] = "as in the buffers of this layout (dp_reshardable)" if checkpoint.bucketed else kept
        facts["critic"] = "yes" if (folder / CRITIC).is_dir() else "no"
        tensors = checkpoint.files.tensors.items()
        rows = [(k, tuple(shape), dtype_name(dtype), len(checkpoint.files.chunks(k))) for k, (shape, dtype) in tensors]
    else:
        reader = HFReader(folder)
        facts["format"] = "Hugging Face (safetensors)"
        rows = [(name, reader.shape(name), dtype_name(reader.dtype(name)), 1) for name in reader.names()]
    weight_files = [*folder.glob("*.distcp"), *folder.glob("*.safetensors")]
    facts["files"] = f"{len(weight_files)}, {sum(file.stat().st_size for file in weight_files) / 1e9:.3f} GB"
    facts["manifest"] = MANIFEST if (folder / MANIFEST).exists() else "none"
    for key, value in facts.items():
        console.print(f"{key:17} {value}", highlight=False, soft_wrap=True)
    console.print(_table(rows))


def _model(config: dict[str, Any]) -> dict[str, str]:
    """What config.json says of a model, of whatever architecture; quantised ones too."""
    experts = next((config[key] for key in _EXPERTS if config.get(key)), None)
    ties = {True: "tied", False: "untied"}
    parts = (
        f"{config.get('num_hidden_layers', '?')} layers of {config.get('hidden_size', '?')}",
        f"{experts} experts" if experts else "",
        f"vocabulary {config.get('vocab_size', '?')}",
        ties.get(config.get("tie_word_embeddings", ""), ""),
    )
    name = (config.get("architectures") or ["unknown"])[0]
    facts = {"model": f"{name}: {', '.join(part for part in parts if part)}"}
    if isinstance(quantization := config.get("quantization_config"), dict):
        facts["quantised"] = str(quantization.get("quant_algo") or quantization.get("quant_method"))
    return facts


def _layout(folder: Path) -> dict[str, Any]:
    """Layout and step, from what lies beside the tensors."""
    facts: dict[str, Any] = {}
    if (folder / RUN).exists():
        run = read_run(folder, "step", "layout")
        facts = {"step": run["step"], "layout": run["layout"]}
    elif (folder / MANIFEST).exists():
        facts = {"layout": read_manifest(folder).layout}
    if "layout" in facts:
        sizes = {key: value for key, value in facts["layout"].items() if value not in (None, 0, 1)}
        facts["layout"] = ", ".join(f"{key} {value}" for key, value in sizes.items()) or "one rank"
    return facts


def _table(rows: Iterable[Row]) -> Table:
    """A line for each name without its numbers, shape and dtype."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for name, shape, dtype, pieces in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        groups.setdefault((pattern, shape, dtype), []).append(pieces)
    table = Table(Column("tensor", overflow="fold"), "shape", "dtype", "tensors", "pieces")
    for (pattern, shape, dtype), group in groups.items():
        table.add_row(pattern, " x ".join(map(str, shape)), dtype, str(len(group)), str(sum(group)))
    return table
