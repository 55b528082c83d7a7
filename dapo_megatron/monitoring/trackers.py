"""Experiment trackers besides metrics.jsonl."""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.monitoring.metrics import Record


class WandbTracker:
    """Weights & Biases. In offline mode everything stays in `run_dir`/wandb.

    Raises:
        UserError: when wandb is not installed.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        if find_spec("wandb") is None:
            raise UserError("tracking.wandb_project is set, but wandb is not installed: run `pip install wandb`")
        os.environ.setdefault("WANDB_SILENT", "true")
        self._run = importlib.import_module("wandb").init(
            project=config.tracking.wandb_project,
            mode=config.tracking.wandb_mode,
            dir=str(run_dir),
            name=run_dir.name,
            config=config.model_dump(),
        )

    def step(self, record: Record) -> None:
        """Log a training step under its own number."""
        self._run.log(record, step=record["step"])

    def evaluation(self, record: Record) -> None:
        """Log an evaluation at the step after which it was made."""
        self._run.log({"evaluation/accuracy": record["accuracy"]}, step=record["step"])

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()
