"""Accuracy on held-out prompts, measured through the rollout servers."""

from pydantic import Field

from dapo_megatron.config.base import Section
from dapo_megatron.config.data import DatasetConfig


class EvaluationConfig(Section):
    """Evaluation before the first step, every `every` steps, and after the last."""

    data: DatasetConfig | None = Field(None, description="Held-out prompts. null: no evaluation.")
    every: int | None = Field(
        None, ge=1, description="Also evaluate every this many steps. null: only before and after."
    )
    samples: int = Field(1, ge=1, description="Answers per prompt; accuracy is their mean (avg@samples).")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling threshold (the paper evaluates with 0.7).")
    confidence: float = Field(0.95, gt=0, lt=1, description="Confidence level of the reported intervals.")
