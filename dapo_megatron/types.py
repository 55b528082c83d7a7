"""What travels between data, rollouts and trainer. Shapes: R responses, K groups, T tokens."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenised. `id` is its position after duplicates were removed."""

    id: int
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str = ""


@dataclass(frozen=True, eq=False)
class Sample:
    """One generated answer, graded.

    `token_ids` and `log_probs` (natural log, under the sampling distribution) have one entry per generated
    token, the end token included. `finish_reason` is what the engine reported: "stop" or "length".
    `versions` are the weight versions of the first and the last token. `reason` is the verdict in a word
    (`dapo_megatron.rewards.Grade.reason`).
    """

    token_ids: Int32  # [n]
    log_probs: Float32  # [n]
    finish_reason: str
    versions: tuple[int, int]
    correct: bool
    reward: float
    reason: str = ""


@dataclass(frozen=True)
class Group:
    """All answers to one drawn prompt. `draw` counts draws over the whole run, from 0."""

    draw: int
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class BatchHeader:
    """What every trainer rank knows of the whole batch. Groups stand in draw order.

    `groups` int32 [R] gives each response's group as an index into the [K] arrays.
    `stats` are the rollout's metrics; `cursor` is the sampler's state after this batch, for the run state.
    """

    step: int
    groups: Int32  # [R]
    draws: Int32  # [K]
    prompt_ids: Int32  # [K] Prompt.id of each group
    prompt_lengths: Int32  # [K]
    response_lengths: Int32  # [R]
    rewards: Float32  # [R] correctness + overlong
    correct: Bool  # [R]
    truncated: Bool  # [R] the engine stopped at the most tokens an answer may have
    versions: Int32  # [R, 2] weight version of the first and the last token
    stats: dict[str, float] = field(default_factory=dict)
    cursor: dict[str, Any] = field(default_factory=dict)

    @property
    def num_responses(self) -> int:
        """R."""
        return len(self.groups)

    @property
    def sequence_lengths(self) -> Int32:
        """Prompt plus response tokens, int32 [R]."""
        return (self.prompt_lengths[self.groups] + self.response_lengths).astype(np.int32)


@dataclass(frozen=True)
class TokenBlock:
    """Token data of some responses of a batch, flat, in the order of `responses`.

    Prompts stand once per response, so that any subset of a batch is self-contained.
    """

    responses: Int32  # [r] indices into the header's [R] arrays
    prompt_lengths: Int32  # [r]
    response_lengths: Int32  # [r]
    prompt_tokens: Int32  # [sum prompt_lengths]
    response_tokens: Int32  # [sum response_lengths]
    rollout_log_probs: Float32  # [sum response_lengths]
