"""What travels between data, rollouts and trainer. Shapes: R responses, K groups, T tokens, S steps."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int16 = NDArray[np.int16]
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
class Steps:
    """Process rewards of one answer: what each of its S steps earned, at the place of the step's last token."""

    places: Int32  # [S] from 0
    rewards: Float32  # [S]


NO_STEPS = Steps(np.zeros(0, np.int32), np.zeros(0, np.float32))
"""Of an answer that is rewarded as a whole."""

NO_ROUTES: Int16 = np.zeros((0, 0, 0), np.int16)
"""Where the experts of tokens are not recorded."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One generated answer, graded.

    `token_ids` and `log_probs` (natural log, under the sampling distribution) have one entry per generated
    token, the end token included. `finish_reason` is what the engine reported: "stop" or "length".
    `versions` are those of the weights that each token was sampled with; they never fall within an answer. `correct` is
    the verdict of the answer rule.
    `reward` is that of the whole answer, length terms included. `score` is what dynamic sampling compares within a
    group: 1 or 0 by the rule, or the number that the reward function gave. `reason` is the verdict in a word
    (`dapo_megatron.rewards.Grade.reason`). `steps` are rewards beside `reward`. `routes` are the k experts that each
    token of prompt and answer went to in each of the L layers with experts, -1 where the engine does not know; empty
    where it was not asked.
    """

    token_ids: Int32  # [n]
    log_probs: Float32  # [n]
    finish_reason: str
    versions: Int32  # [n]
    correct: bool
    reward: float
    score: float
    reason: str = ""
    steps: Steps = NO_STEPS
    routes: Int16 = field(default_factory=lambda: NO_ROUTES)  # [prompt + n, L, k]


@dataclass(frozen=True)
class Group:
    """All answers to one drawn prompt. `draw` counts draws over the whole run, from 0."""

    draw: int
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class BatchHeader:
    """What every trainer rank knows of the whole batch. Groups stand in draw order.

    `groups` int32 [R] gives each response's group as an index into the [K] arrays. The `step_` arrays hold the process
    rewards of all responses, S in all: `step_responses` as indices into the [R] arrays, ascending, `step_places` the
    place of the step's last token in its response, from 0. The `run_` arrays hold the weight versions of the tokens: V
    runs of tokens that were sampled with the same weights, in the order of the responses, then of the tokens.
    `oldest_in_loss` is the trainer's: tokens of older weights than this version are in no loss, as if they stood in the
    prompt. `stats` are the rollout's metrics; `cursor` is the sampler's state after this batch, for the run state.
    """

    step: int
    groups: Int32  # [R]
    draws: Int32  # [K]
    prompt_ids: Int32  # [K] Prompt.id of each group
    prompt_lengths: Int32  # [K]
    response_lengths: Int32  # [R]
    rewards: Float32  # [R] of whole responses: correctness (or the reward function's number) + overlong
    correct: Bool  # [R]
    truncated: Bool  # [R] the engine stopped at the most tokens an answer may have
    step_responses: Int32 = field(default_factory=lambda: NO_STEPS.places)  # [S]
    step_places: Int32 = field(default_factory=lambda: NO_STEPS.places)  # [S]
    step_rewards: Float32 = field(default_factory=lambda: NO_STEPS.rewards)  # [S]
    run_responses: Int32 = field(default_factory=lambda: NO_STEPS.places)  # [V] ascending
    run_versions: Int32 = field(default_factory=lambda: NO_STEPS.places)  # [V]
    run_lengths: Int32 = field(default_factory=lambda: NO_STEPS.places)  # [V] at least 1
    oldest_in_loss: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    cursor: dict[str, Any] = field(default_factory=dict)

    @property
    def num_responses(self) -> int:
        """R."""
        return len(self.groups)

    @property
    def versions(self) -> Int32:
        """Weight version of each response's first and last token, int32 [R, 2]; -1 where nobody knows it."""
        versions = np.full((self.num_responses, 2), -1, np.int32)
        versions[self.run_responses, 1] = self.run_versions  # the last of several assignments stays
        versions[self.run_responses[::-1], 0] = self.run_versions[::-1]
        return versions

    @property
    def lengths_out_of_loss(self) -> Int32:
        """Tokens at the start of each response that are older than `oldest_in_loss`, int32 [R].

        They are its first ones because versions never fall within a response.
        """
        old = np.where(self.run_versions < self.oldest_in_loss, self.run_lengths, 0)
        return np.bincount(self.run_responses, old, minlength=self.num_responses).astype(np.int32)

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
    routes: Int16 = field(default_factory=lambda: NO_ROUTES)  # [sum of both lengths, L, k], or empty
