"""On ranks: conversions that processes share, and models in real layouts from what was converted in others."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch import Tensor

from dapo_megatron.checkpoint.compare import differences
from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.reshard import reshard
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import PolicyModel, build_model, load_weights


def convert(case: dict[str, Any]) -> None:
    """There, to another layout, and back."""
    hf, out = Path(case["hf"]), Path(case["out"])
    first, second = (ParallelConfig.model_validate(layout) for layout in case["layouts"])
    hf_to_megatron(hf, out / "megatron", first)
    reshard(out / "megatron", out / "reshard", second)
    megatron_to_hf(out / "reshard", out / "back", shard_bytes=case["shard_bytes"])


def run_layout(case: dict[str, Any]) -> dict[str, list[str]]:
    """What is wrong with a conversion to this rank's layout, and with models made from a conversion to another.

    Returns:
        Names of what differs, by what was compared; [] where nothing does.
    """
    hf, out, other = Path(case["hf"]), Path(case["out"]), Path(case["other"])
    config = ParallelConfig.model_validate(case["layout"])
    hf_to_megatron(hf, out / "ours", config)
    parallel.initialize(config, seed=1, threads=1)
    model = build(hf, config)
    for chunk in model:
        load_weights(chunk, open_weights(hf))
    save_as_megatron(model, hf, out / "theirs")
    return {
        "lies elsewhere": differing(stored(out / "ours"), stored(out / "theirs")),
        "in the file of another rank": differing(owners(out / "ours"), owners(out / "theirs")),
        "extra states": sorted(DistReader(out / "theirs").objects - DistReader(out / "ours").objects),
        "read by us": [found.name for found in differences(hf, out / "theirs")] if dist.get_rank() == 0 else [],
        "loaded by us": differing(weights(from_folder(other, hf, config)), weights(model)),
        "loaded by megatron": differing(weights(loaded_by_megatron(other, hf, config)), weights(model)),
    }


def build(hf: Path, config: ParallelConfig) -> list[PolicyModel]:
    """This rank's chunks, every number in them wrong."""
    training = TrainingConfig.model_validate({"precision": "fp32"})
    chunks = build_model(architecture_of(hf), config, training, temperature=1.0)
    with torch.no_grad():
        for chunk in chunks:
            for tensor in (*chunk.parameters(), *chunk.buffers()):
                tensor.fill_(-7)
    return chunks


def sharded(chunks: list[PolicyModel]) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {f"model{i}": chunk.sharded_state_dict(metadata={"dp_cp_group": group}) for i, chunk in enumerate(chunks)}


def save_as_megatron(chunks: list[PolicyModel], hf: Path, folder: Path) -> None:
    if dist.get_rank() == 0:
        shutil.copytree(hf, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    dist.barrier()
    dist_checkpointing.save(sharded(chunks), str(folder))


def loaded_by_megatron(folder: Path, hf: Path, config: ParallelConfig) -> list[PolicyModel]:
    chunks = build(hf, config)
    loaded = dist_checkpointing.load(sharded(chunks), str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    return chunks


def from_folder(folder: Path, hf: Path, config: ParallelConfig) -> list[PolicyModel]:
    chunks = build(hf, config)
    for chunk in chunks:
        load_weights(chunk, open_weights(folder))
    return chunks


def weights(chunks: list[PolicyModel]) -> dict[str, Tensor]:
    """Parameters, and the buffers that checkpoints hold, by chunk and name."""
    found: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        kept = {name: buffer for name, buffer in chunk.named_buffers() if name in chunk.state_dict()}
        found |= {f"{i} {name}": tensor for name, tensor in (dict(chunk.named_parameters()) | kept).items()}
    return found


def stored(folder: Path) -> dict[str, Any]:
    """What lies where: shape, dtype and boxes of each tensor."""
    reader = DistReader(folder)
    return {key: (*of, [(c.offset, c.shape) for c in reader.chunks(key)]) for key, of in reader.tensors.items()}


def owners(folder: Path) -> dict[str, str]:
    """The rank whose file holds a chunk, for each."""
    reader = DistReader(folder)
    chunks = [chunk for key in reader.tensors for chunk in reader.chunks(key)]
    return {f"{chunk.key} {chunk.offset}": chunk.file.split("_")[2] for chunk in chunks}


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is in one alone, or not equal."""
    both = found.keys() & expected.keys()
    wrong = [name for name in both if not _equal(found[name], expected[name])]
    return sorted([*wrong, *(found.keys() ^ expected.keys())])


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for case in job["conversions"]:
        convert(case)
    outcome: dict[str, Any] = {}
    for case in job["layouts"]:
        mine = run_layout(case)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        outcome[case["name"]] = every
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
