"""Hugging Face folders of random numbers with every tensor that a model of a family can have, without a model."""

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.layout import check_layout
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.table import hf_shapes
from tests.models import TINY, TINY_FAMILIES

# Small enough for many conversions, and every tensor-parallel size up to 4 divides its heads.
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_key_value_heads": 4}
# Expert 10 must not be taken for one between 1 and 2.
TWELVE_EXPERTS = {"num_experts": 12, "moe_intermediate_size": 8}


def random_checkpoint(
    folder: Path,
    family: str,
    *,
    tied: bool = False,
    vocab: int = 151,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **config: Any,
) -> Path:
    """Write config.json, a tokenizer file and `shards` safetensors files. `family` is one of `TINY_FAMILIES`."""
    import transformers

    name, own, scaling = TINY_FAMILIES[family]
    values = TINY | SMALL | own | (TWELVE_EXPERTS if family == "qwen3_moe" else {}) | config
    getattr(transformers, f"{name}Config")(
        **values,
        architectures=[f"{name}ForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | scaling,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        dtype=dtype,
    ).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    save_tensors(folder, random_tensors(architecture_of(folder), dtype), shards)
    return folder


def random_tensors(arch: Architecture, dtype: torch.dtype) -> dict[str, Tensor]:
    """A normal number for every element; the biases of routers are fp32 in every checkpoint."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in hf_shapes(arch, extra=True).items():
        tensor = torch.randn(shape, generator=generator)
        tensors[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
    return tensors


def save_tensors(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write them into so many files, with an index where there are several, in place of what is there."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, own in files.items() for name in own}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder, as safetensors itself reads them."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def files_of(folder: Path, *without: str) -> dict[str, str]:
    """SHA-256 of every file below a folder but those named `without`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


def digests(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """(shape, dtype, SHA-256 of the bytes) of each tensor."""
    return {
        name: (
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for name, tensor in tensors.items()
    }


PIPELINES: list[dict[str, Any]] = [
    {},
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"pipeline": 3, "pipeline_layers": [1, 2, 1]},
]


def legal_layouts(arch: Architecture) -> Iterator[ParallelConfig]:
    """Of TP 1, 2, 4 x PP 1, 2, 4, with two chunks on a stage, uneven x EP 1, 2, 4 x ETP 1, 2 what a model can have."""
    for tensor, stages, expert, expert_tensor in product((1, 2, 4), PIPELINES, (1, 2, 4), (1, 2)):
        parallel = ParallelConfig.model_validate(
            stages | {"tensor": tensor, "sequence": tensor > 1, "expert": expert, "expert_tensor": expert_tensor}
        )
        try:
            check_layout(arch, parallel, "the model")
        except UserError:
            continue
        yield parallel
