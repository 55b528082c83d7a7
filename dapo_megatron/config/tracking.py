"""Where metrics go besides the console and metrics.jsonl."""

from typing import Literal

from pydantic import Field

from dapo_megatron.config.base import Section


class TrackingConfig(Section):
    """Console and Weights & Biases."""

    console: Literal["auto", "live", "plain"] = Field(
        "auto",
        description="`live` redraws a table, `plain` prints a line a step; `auto` asks whether it is a terminal.",
    )
    wandb_project: str | None = Field(None, description="Weights & Biases project. null: not used.")
    wandb_mode: Literal["online", "offline"] = Field("online", description="`offline` writes to the run folder only.")
