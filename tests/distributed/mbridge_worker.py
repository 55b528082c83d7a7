"""On ranks: models filled by mbridge and by us, and exported by both."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import build_model, export_weights, load_weights
from tests.oracle import bridge


@torch.no_grad()
def compare(folder: Path, layout: dict[str, Any]) -> dict[str, list[str]]:
    """Local parameters that differ when mbridge loads them, and tensors that differ when mbridge exports ours."""
    sizes = ParallelConfig.model_validate(layout)
    parallel.initialize(sizes, seed=1, threads=1)
    training = TrainingConfig(precision="fp32", layer_backend="local")
    arch, reader = architecture_of(folder), HFReader(folder)
    theirs, ours = (build_model(arch, sizes, training, temperature=1.0) for _ in range(2))
    converter = bridge(folder)
    converter.load_weights(theirs, str(folder))
    for chunk in ours:
        load_weights(chunk, reader)
    pairs = [
        (name, ours_parameter, dict(their_chunk.named_parameters())[name])
        for our_chunk, their_chunk in zip(ours, theirs, strict=True)
        for name, ours_parameter in our_chunk.named_parameters()
    ]
    loaded = [name for name, a, b in pairs if not torch.equal(a, b)]
    differing: list[str] = []
    if sizes.pipeline == 1:  # its exchange between stages needs CUDA
        exported = {name: tensor.clone() for name, tensor in converter.export_weights(ours)}
        own = {name: tensor.clone() for name, tensor in export_weights(ours)}
        assert exported.keys() == own.keys()
        differing = [name for name in own if not torch.equal(own[name], exported[name])]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (loaded, len(pairs)))
    return {
        "loaded": [name for names, _ in everywhere for name in names],
        "exported": differing,
        "parameters": [str(count) for _, count in everywhere],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = {case["name"]: compare(Path(case["model"]), case["parallel"]) for case in job["cases"]}
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
