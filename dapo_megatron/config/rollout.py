"""Generation and dynamic sampling (eq. 11)."""

from typing import Literal

from pydantic import Field, model_validator

from dapo_megatron.config.base import Section


class RolloutConfig(Section):
    """How answers are sampled and which groups are trained on."""

    prompts_per_step: int = Field(512, ge=1, description="N: groups in a training batch.")
    samples_per_prompt: int = Field(
        16,
        ge=1,
        description="G: answers per prompt (a group). 1 only with algorithm.advantage.estimator reinforce_pp and "
        "without dynamic_sampling.",
    )
    max_tokens: int = Field(
        20480,
        ge=1,
        description="L_max: most tokens of one answer (algorithm.overlong.shift=past_max lets it have more).",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; log-probs are of logits / temperature.")
    top_p: float = Field(1.0, description="Must be 1: with less, importance ratios are undefined for cut tokens.")
    stop: list[str] = Field(
        default_factory=list,
        description="An answer also ends at the first token whose text contains one of these strings. "
        "The token stays in the answer, as an end-of-sequence token does.",
    )
    dynamic_sampling: bool = Field(
        True,
        description="Train only on groups with at least one right and one wrong answer, and draw until there are N.",
    )
    max_rounds: int | None = Field(
        10, ge=1, description="Budget of a step in rounds; a round is prompts_per_step prompts drawn. null: no limit."
    )
    max_prompts_per_step: int | None = Field(
        None, ge=1, description="Budget of a step in prompts drawn. null: no limit."
    )
    on_exhausted: Literal["train_smaller", "wait_next", "stop"] = Field(
        "train_smaller",
        description="When the budget is used up: train on the groups kept so far, go on sampling with a new budget, "
        "or save and end the run with exit code 0.",
    )
    replay: str | None = Field(
        None, description="Directory of recorded batches (a run's `rollouts/`) to train on instead of generating."
    )

    @model_validator(mode="after")
    def _sampling_is_exact(self) -> "RolloutConfig":
        if self.top_p != 1.0:
            raise ValueError(
                "top_p must be 1 for training: the engine's log-probs of cut tokens make ratios meaningless"
            )
        if self.max_prompts_per_step is not None and self.max_prompts_per_step < self.prompts_per_step:
            raise ValueError(
                f"max_prompts_per_step ({self.max_prompts_per_step}) must be at least "
                f"prompts_per_step ({self.prompts_per_step})"
            )
        return self

    @property
    def prompt_budget(self) -> int | None:
        """Most prompts drawn in one step, or None without a limit."""
        limits = [self.max_prompts_per_step] if self.max_prompts_per_step is not None else []
        if self.max_rounds is not None:
            limits.append(self.max_rounds * self.prompts_per_step)
        return min(limits, default=None)
