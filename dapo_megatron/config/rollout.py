"""Generation and dynamic sampling (eq. 11)."""

from typing import Literal

from pydantic import Field, model_validator

from dapo_megatron.config.base import Section


class AdaptiveGroupConfig(Section):
    """Groups no larger than the policy's accuracy asks for."""

    sizes: list[int] = Field(
        min_length=2, description="Group sizes to choose from, ascending; the last is rollout.samples_per_prompt."
    )
    acceptance: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="Each step takes the smallest size G at which a group of a prompt with pass rate p, the running "
        "accuracy, has both right and wrong answers with at least this probability, 1 - p^G - (1 - p)^G; the largest "
        "where none does or nothing is known yet.",
    )

    @model_validator(mode="after")
    def _sizes_ascend(self) -> "AdaptiveGroupConfig":
        if self.sizes != sorted(set(self.sizes)) or self.sizes[0] < 2:
            raise ValueError(f"sizes ({self.sizes}) must be ascending numbers of at least 2 answers")
        return self


class HistoryConfig(Section):
    """What is made of each prompt's earlier groups. They are recorded in any case."""

    rest_after: int | None = Field(
        None,
        ge=1,
        description="A prompt whose answers were all right this many times running rests: it is not drawn for "
        "rest_epochs epochs. Where all prompts would rest, none does. null: no prompt rests.",
    )
    rest_epochs: int = Field(1, ge=1, description="Epochs for which a prompt rests, after the one it was drawn in.")
    hard_every: int | None = Field(
        None,
        ge=2,
        description="Every this many draws, one is of a prompt that had no right answer when it was last drawn (the "
        "one not drawn for longest), beside its turn in the epoch. null: prompts are drawn in their order alone.",
    )


class RolloutConfig(Section):
    """How answers are sampled and which groups are trained on."""

    prompts_per_step: int = Field(512, ge=1, description="N: groups in a training batch.")
    samples_per_prompt: int = Field(
        16,
        ge=1,
        description="G: answers per prompt (a group). 1 only with algorithm.advantage.estimator reinforce_pp or gae, "
        "and without dynamic_sampling.",
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
    adaptive_group: AdaptiveGroupConfig | None = Field(
        None, description="Vary the group size from step to step. null: it is samples_per_prompt."
    )
    history: HistoryConfig = Field(default_factory=HistoryConfig, description="What earlier groups of a prompt change.")
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
    selection: Literal["draw_order", "arrival"] = Field(
        "draw_order",
        description="Which mixed groups are trained on: the first N in the order they were drawn, or the first N to be "
        "complete. `arrival` prefers short answers: for comparison only.",
    )
    partial_rollouts: Literal["requeue", "resume"] = Field(
        "requeue",
        description="What becomes of answers that a step began and did not need: their prompts are drawn again, and "
        "the answers begin anew (requeue) or go on where they were (resume; they hold tokens of older weights then).",
    )
    pipeline: Literal["sync", "one_step_off", "async"] = Field(
        "sync",
        description="sync: a step's answers are of the weights it trains. one_step_off: they are generated while the "
        "step before is trained, by the weights that one began with. async: as one_step_off, up to max_staleness steps "
        "ahead, and answers under way go on with new weights when these arrive.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Most versions by which a token's weights may be older than those it trains; a hard bound: what "
        "would be older is generated anew. null: the least that pipeline and partial_rollouts allow: 0 for sync with "
        "requeue, 2 for one_step_off with resume, else 1. More changes nothing for one_step_off with requeue.",
    )
    watchdog_after: float = Field(
        900,
        gt=0,
        description="Seconds after which a prompt without a complete group is named in the log, with its server.",
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

    @model_validator(mode="after")
    def _largest_group_is_the_groups_size(self) -> "RolloutConfig":
        if self.adaptive_group is None:
            return self
        if not self.dynamic_sampling:
            raise ValueError("adaptive_group needs dynamic_sampling=true: without it, every group is accepted")
        if self.adaptive_group.sizes[-1] != self.samples_per_prompt:
            raise ValueError(
                f"samples_per_prompt ({self.samples_per_prompt}) must be the largest of adaptive_group.sizes "
                f"({self.adaptive_group.sizes[-1]})"
            )
        return self

    @model_validator(mode="after")
    def _staleness_fits_the_pipeline(self) -> "RolloutConfig":
        given, least = self.max_staleness, self._least_staleness
        how = f"pipeline={self.pipeline} and partial_rollouts={self.partial_rollouts}"
        if given is not None and given < least:
            raise ValueError(
                f"max_staleness ({given}) must be at least {least} with {how}: no answer would be young enough"
            )
        if given and not least:
            raise ValueError(
                f"max_staleness ({given}) must be 0 or null with {how}: all tokens are of the step's weights"
            )
        return self

    @property
    def _least_staleness(self) -> int:
        """Versions that answers fall behind in any case: a step that is trained meanwhile, one that began them."""
        resumed = self.partial_rollouts == "resume"
        return {"sync": int(resumed), "one_step_off": 1 + resumed, "async": 1}[self.pipeline]

    @property
    def staleness_bound(self) -> int:
        """Most versions by which a token's weights may be older than those it trains: `max_staleness`, or its least."""
        return self._least_staleness if self.max_staleness is None else self.max_staleness

    @property
    def steps_ahead(self) -> int:
        """Steps whose sampling may begin before the one that is trained next is complete."""
        return {"sync": 0, "one_step_off": 1, "async": self.staleness_bound}[self.pipeline]

    @property
    def prompt_budget(self) -> int | None:
        """Most prompts drawn in one step, or None without a limit."""
        limits = [self.max_prompts_per_step] if self.max_prompts_per_step is not None else []
        if self.max_rounds is not None:
            limits.append(self.max_rounds * self.prompts_per_step)
        return min(limits, default=None)
