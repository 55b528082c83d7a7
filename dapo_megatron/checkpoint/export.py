"""The trained policy as a Hugging Face checkpoint."""

from pathlib import Path

from dapo_megatron.checkpoint.hf import write_hf
from dapo_megatron.config.run import Config
from dapo_megatron.trainer.policy import Policy


def export_hf(config: Config, policy: Policy) -> None:
    """Write the policy's weights to `run.dir`/hf, in the training precision. A collective over one replica.

    Everything but the weights (config.json, tokenizer) is taken from `model.path`.
    """
    if not policy.layout.sends_weights:
        return
    if policy.layout.rank == 0:
        write_hf(Path(config.run.dir) / "hf", config.model.path, policy.export())
    else:
        for _ in policy.export():  # take part in the gathering of each parameter
            pass
