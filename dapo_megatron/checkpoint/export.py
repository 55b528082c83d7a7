"""The trained policy as a Hugging Face checkpoint."""

import itertools
from pathlib import Path

import torch

from dapo_megatron.checkpoint.hf import write_hf
from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.config.run import Config
from dapo_megatron.models.table import exact_tensors, hf_shapes
from dapo_megatron.trainer.policy import Policy


def export_hf(config: Config, policy: Policy) -> None:
    """Write the policy's weights to `run.dir`/hf, in the training precision. A collective over one replica.

    Everything but the weights (config.json, tokenizer) is taken from `model.path`.
    """
    if not policy.layout.sends_weights:
        return
    tensors = policy.export()
    if policy.layout.rank == 0:
        first = next(tensors)
        exact = exact_tensors(policy.arch)
        entries = [
            Entry(name, torch.float32 if name in exact else first[1].dtype, shape)
            for name, shape in hf_shapes(policy.arch).items()
        ]
        write_hf(Path(config.run.dir) / "hf", config.model.path, itertools.chain([first], tensors), entries)
    else:
        for _ in tensors:  # take part in the gathering of each parameter
            pass
