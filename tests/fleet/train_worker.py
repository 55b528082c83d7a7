"""On ranks: trainings one after another."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from dapo_megatron.config.load import load_config
from dapo_megatron.config.preflight import preflight
from dapo_megatron.train import train
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.ranks import on_rank_zero


def main() -> None:
    """Trains with each of the job's `jobs`: the path of a configuration, then overrides."""
    job = json.loads(Path(sys.argv[1]).read_text())
    for path, *overrides in job["jobs"]:
        config = load_config(path, overrides)
        layout = parallel.initialize(config.parallel, config.run.seed, config.training.threads)
        on_rank_zero(lambda config=config, ranks=layout.world_size: preflight(config, ranks))
        train(config, layout)
    if dist.get_rank() == 0:
        Path(job["result"]).write_text("{}")
    dist.destroy_process_group()
