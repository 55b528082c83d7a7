"""The trained policy as a Hugging Face checkpoint."""

import itertools
from pathlib import Path

import torch

from dapo_megatron.checkpoint.hf import write_hf
from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.checkpoint.untrained import Untrained, missing_layers
from dapo_megatron.config.run import Config
from dapo_megatron.models.table import exact_tensors, hf_shapes, parameter_table
from dapo_megatron.trainer.policy import Policy


def export_hf(config: Config, policy: Policy) -> None:
    """Write the policy's weights to `run.dir`/hf, in the training precision. A collective over one replica.

    What is not trained is taken from `model.path`: config.json, the tokenizer, layers for multi-token prediction.

    Raises:
        UserError: if such layers are damaged there, or the disk is full.
    """
    if not policy.layout.sends_weights:
        return
    tensors = policy.export()
    if policy.layout.rank == 0:
        first = next(tensors)
        dtype, exact = first[1].dtype, exact_tensors(policy.arch)
        layers = missing_layers(policy.arch, parameter_table(policy.arch))
        rest = Untrained(layers, Path(config.model.path), dtype)
        entries = [
            Entry(name, torch.float32 if name in exact else dtype, shape)
            for name, shape in hf_shapes(policy.arch).items()
        ]
        whole = itertools.chain([first], tensors, rest)
        write_hf(Path(config.run.dir) / "hf", config.model.path, whole, entries + rest.entries)
    else:
        for _ in tensors:  # take part in the gathering of each parameter
            pass
