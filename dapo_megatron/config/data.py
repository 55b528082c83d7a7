"""Where prompts come from and how answers are graded."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dapo_megatron.config.base import Section

RewardRule = Literal["dapo", "exact"]
Task = Literal["addition", "chain_sum"]


class ArithmeticConfig(Section):
    """A generated, verifiable few-shot task (`dapo_megatron.data.arithmetic`)."""

    task: Task = Field(
        "addition",
        description="`addition`: a + b of two-digit numbers. `chain_sum`: running totals of 2 to `terms` digits.",
    )
    split: Literal["train", "test"] = Field(
        "train", description="Which part of the problems, which share none: `test` has a quarter, `train` the rest."
    )
    problems: int = Field(4096, ge=1, description="How many different problems to draw from the split.")
    shots: int = Field(4, ge=0, description="Solved examples before the question.")
    terms: int = Field(4, ge=2, le=32, description="`chain_sum` only: the most numbers added in one problem.")
    seed: int = Field(0, ge=0, description="Seed of the problems.")


class DatasetConfig(Section):
    """A set of prompts: files or a Hub name in the DAPO row schema, or a generated task."""

    path: str | None = Field(
        None,
        description="A .parquet, .jsonl or .json file, or a Hugging Face Hub dataset name. Each row has `prompt` "
        "(chat messages, or a plain string that is used as it stands) and `reward_model.ground_truth`. For DPO, in its "
        "place: `chosen` and `rejected`, the better and the worse answer, as strings or as a message of the assistant; "
        "without `prompt`, they hold the whole conversation (messages, or a text of `Human:` and `Assistant:` turns).",
    )
    split: str = Field("train", description="Split to load when `path` is a Hub name.")
    arithmetic: ArithmeticConfig | None = Field(
        None,
        description="Generate the prompts instead of loading them; for DPO, pairs of the right answer and one with a "
        "number a little off.",
    )
    limit: int | None = Field(
        None, ge=1, description="Use only the first `limit` prompts or pairs (after duplicates are removed)."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "DatasetConfig":
        if (self.path is None) == (self.arithmetic is None):
            raise ValueError("give exactly one of `path` and `arithmetic`")
        return self


class DataConfig(Section):
    """Training prompts and the grading rule."""

    train: DatasetConfig = Field(
        description="The prompts to train on. For DPO, pairs of answers: those that are longer than rollout.max_tokens "
        "with their end (rollout.stop, or the end-of-sequence token) are skipped and counted."
    )
    max_prompt_tokens: int = Field(
        2048, ge=1, description="Prompts longer than this many tokens are skipped and counted."
    )
    shuffle: bool = Field(True, description="Draw prompts in a new random order each epoch (seeded by run.seed).")
    reward: RewardRule = Field(
        "dapo",
        description="How an answer is judged. `dapo`: the last `Answer: ...` of the last 300 characters, normalised. "
        "`exact`: the whole response, stripped, equals the gold answer.",
    )
    reward_function: str | None = Field(
        None,
        description="A function of yours that rewards training answers, as `package.module:function` or "
        "`path/to/file.py:function`. It gets a `dapo_megatron.rewards.Answer`, in several threads at once, and returns "
        "a number (the reward, in place of `reward`'s +1 or -1, and what dynamic sampling compares), one number per "
        "token, or pairs (place, number) of steps that end at a token, from 0 (process rewards, beside +1 or -1). "
        "Evaluation keeps to `reward`.",
    )

    @field_validator("reward_function")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"([^\W\d]\w*(\.[^\W\d]\w*)*|.*\.py):[^\W\d]\w*", value):
            raise ValueError(f"{value} is neither `package.module:function` nor `path/to/file.py:function`")
        return value
