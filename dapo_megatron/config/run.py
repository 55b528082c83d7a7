"""The root of a run's configuration and the rules that span sections."""

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.config.base import Section, as_yaml
from dapo_megatron.config.critic import CriticConfig, ReferenceConfig
from dapo_megatron.config.data import DataConfig
from dapo_megatron.config.evaluation import EvaluationConfig
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.precision import packed_alignment, sequence_alignment
from dapo_megatron.config.preset import resolve_cache_tokens, with_preset
from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.config.tracking import TrackingConfig
from dapo_megatron.config.training import ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig

GIVEN_ANSWERS = {
    "rollout.pipeline": "sync",
    "rollout.partial_rollouts": "requeue",
    "rollout.selection": "draw_order",
}
"""What the rollout section says where nothing is generated."""


class RunConfig(Section):
    """Length, place and life of a run."""

    dir: str = Field(description="Folder of everything the run writes.")
    steps: int = Field(ge=1, description="Training steps: rollouts that lead to an update.")
    seed: int = Field(1, ge=0, description="Seed of the prompt order, the servers and the trainer.")
    save_every: int | None = Field(
        None, ge=1, description="Save the run state every this many steps. null: only at the end."
    )
    keep: int = Field(2, ge=1, description="Saved states kept; older ones are deleted after a new one is complete.")
    reshardable: Literal["last", "always"] = Field(
        "last",
        description="Which states a run in another layout can continue from: the `last` one, or all (`always`). The "
        "others need the layout they were saved in, and are written without gathering the optimizer's state.",
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="`auto` continues from the newest saved state in `dir`; `never` refuses a folder that has one.",
    )
    export: bool = Field(
        True, description="Write the trained model as a Hugging Face checkpoint to `dir`/hf at the end."
    )


class Config(Section):
    """Everything a run needs."""

    run: RunConfig = Field(description="The run.")
    model: ModelConfig = Field(description="The model.")
    data: DataConfig = Field(description="Prompts and grading.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation and dynamic sampling.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="The objective.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="Batches and precision.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Megatron layout.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic of PPO.")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="The frozen reference policy.")
    fleet: FleetConfig = Field(default_factory=FleetConfig, description="vLLM servers.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Held-out accuracy.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Metrics.")

    @model_validator(mode="before")
    @classmethod
    def _preset_is_filled_in(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return resolve_cache_tokens(with_preset(values), RolloutConfig.model_fields["max_tokens"].default)

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> "Config":
        estimator = self.algorithm.advantage.estimator
        if self.rollout.samples_per_prompt > 1:
            return self
        if estimator not in ("reinforce_pp", "gae"):
            raise ValueError(
                f"rollout.samples_per_prompt (1) must be at least 2 with algorithm.advantage.estimator={estimator}, "
                "which compares the answers to a prompt; reinforce_pp and gae allow 1"
            )
        if self.rollout.dynamic_sampling:
            raise ValueError(
                "rollout.dynamic_sampling (true) must be false with rollout.samples_per_prompt=1: one answer is "
                "never both right and wrong, so that no group would be kept"
            )
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> "Config":
        group, batch, mini = self.rollout.samples_per_prompt, self.responses_per_step, self.training.mini_batch
        if mini % group:
            raise ValueError(
                f"training.mini_batch ({mini}) must be a multiple of rollout.samples_per_prompt ({group}): "
                "a mini-batch holds whole groups"
            )
        if batch % mini:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.samples_per_prompt ({batch}) must be a multiple of "
                f"training.mini_batch ({mini})"
            )
        overlong = self.algorithm.overlong
        if overlong.shift == "before_max" and overlong.cache_tokens > self.rollout.max_tokens:
            raise ValueError(
                f"algorithm.overlong.cache_tokens ({overlong.cache_tokens}) must not exceed "
                f"rollout.max_tokens ({self.rollout.max_tokens})"
            )
        self._micro_batches_fit()
        return self

    @model_validator(mode="after")
    def _dpo_is_offline(self) -> "Config":
        if self.algorithm.loss != "dpo":
            return self
        needed: dict[str, object] = {
            **GIVEN_ANSWERS,
            "rollout.dynamic_sampling": False,
            "rollout.samples_per_prompt": 2,
            "rollout.replay": None,
            "evaluation.data": None,
            "training.mini_batch": self.responses_per_step,
        }
        self._require(
            needed,
            "with algorithm.loss=dpo, which trains on given pairs, all of a step in one update, and has no servers",
        )
        return self

    @model_validator(mode="after")
    def _pipeline_fits(self) -> "Config":
        if self.rollout.replay is not None:
            self._require(GIVEN_ANSWERS, "with rollout.replay, which trains on recorded answers and has no servers")
        if self.fleet.mode == "colocated":
            self._require({"rollout.pipeline": "sync"}, "with fleet.mode=colocated: trainer and servers take turns")
        if self.rollout.pipeline != "async":
            self._require({"fleet.on_push": "abort"}, "unless rollout.pipeline=async: no answer is under way in a push")
        return self

    @model_validator(mode="after")
    def _stale_tokens_can_leave(self) -> "Config":
        limit, bound = self.algorithm.rollout_correction.max_token_staleness, self.rollout.staleness_bound
        if limit is None:
            return self
        key = f"algorithm.rollout_correction.max_token_staleness ({limit})"
        if limit >= bound:
            raise ValueError(f"{key} must be less than rollout.max_staleness ({bound}), or no token is ever that old")
        if self.rollout.pipeline == "one_step_off" and limit == 0:
            raise ValueError(
                f"{key} must be at least 1 with rollout.pipeline=one_step_off, where every token is a version old"
            )
        return self

    @model_validator(mode="after")
    def _routes_can_be_had(self) -> "Config":
        if self.training.router_replay == "R2":
            self._require({"algorithm.old_log_probs": "recompute"}, "with training.router_replay=R2, which replays it")
        if self.training.router_replay == "R3":
            self._require(
                {"fleet.pipeline": 1}, "with training.router_replay=R3: vLLM returns no routes from several stages"
            )
            if self.algorithm.loss == "dpo":
                raise ValueError("training.router_replay (R3) needs servers, which algorithm.loss=dpo has not")
        return self

    def _require(self, needed: Mapping[str, object], when: str) -> None:
        """Raises ValueError for the first dotted key that has not the value it needs."""
        for key, only in needed.items():
            if (value := attrgetter(key)(self)) != only:
                raise ValueError(f"{key} ({as_yaml(value)}) must be {as_yaml(only)} {when}")

    def _micro_batches_fit(self) -> None:
        """A micro-batch holds the longest sequence with its padding, and ends where the layout and FP8 allow."""
        size = self.training.micro_batch_tokens
        longest = self.longest_sequence
        alignment = sequence_alignment(self.training, self.parallel)
        if size < (padded := math.ceil(longest / alignment) * alignment):
            padding = f", padded to a multiple of {alignment}: {padded}" if padded > longest else ""
            raise ValueError(
                f"training.micro_batch_tokens ({size}) must hold the longest sequence: "
                f"{self.longest_sequence_keys} = {longest}{padding}"
            )
        if size % (multiple := packed_alignment(self.training, self.parallel)):
            below = size // multiple * multiple
            raise ValueError(
                f"training.micro_batch_tokens ({size}) must be a multiple of {multiple}, as parallel.context, "
                f"parallel.sequence and FP8 ask; use {below if below >= padded else below + multiple}"
            )

    @property
    def has_servers(self) -> bool:
        """Whether answers are generated, not read from a recording or given as pairs."""
        return self.rollout.replay is None and self.algorithm.loss != "dpo"

    @property
    def notes(self) -> list[str]:
        """What is allowed and may still surprise: one sentence each, told by `--dry-run` and at a run's start."""
        rollout, correction, found = self.rollout, self.algorithm.rollout_correction, []
        if rollout.selection == "arrival":
            found.append("rollout.selection=arrival prefers short answers: for comparison only")
        if rollout.pipeline != "sync" and correction.mode == "none" and self.algorithm.old_log_probs == "recompute":
            found.append(
                f"rollout.pipeline={rollout.pipeline} trains on tokens of older weights as if they were the policy's "
                "own; algorithm.rollout_correction.mode (tis or mis) weighs them"
            )
        return found

    @property
    def responses_per_step(self) -> int:
        """Responses in a full training batch, N x G."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def generation_limit(self) -> int:
        """Most tokens of one answer: L_max, and L_cache more where the overlong penalty grows past L_max."""
        overlong = self.algorithm.overlong
        return self.rollout.max_tokens + (overlong.cache_tokens if overlong.shift == "past_max" else 0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        return self.data.max_prompt_tokens + self.generation_limit

    @property
    def longest_sequence_keys(self) -> str:
        """The keys whose sum is `longest_sequence`, for messages."""
        past_max = " + algorithm.overlong.cache_tokens" if self.algorithm.overlong.shift == "past_max" else ""
        return f"data.max_prompt_tokens + rollout.max_tokens{past_max}"
