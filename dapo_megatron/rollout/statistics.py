"""What was drawn in a step, what became of it and what it cost: the metrics of a rollout."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dapo_megatron.types import Prompt, Sample

Outcome = Literal["kept", "all_right", "all_wrong", "failed", "surplus", "aborted"]
"""Of a draw up to the last that is trained on: its group is trained on (kept), was dropped for all answers being right
or none (all_right, all_wrong: equal scores), or lost an answer for good (failed). Of a later one, whose prompt goes
back: its group finished (surplus) or was stopped before (aborted). With `selection: arrival`, a later one is one that
was not finished when there were enough."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
COMPLETE: tuple[Outcome, ...] = ("kept", "all_right", "all_wrong")


@dataclass(frozen=True)
class Draw:
    """One draw of a step. `number` counts draws over the whole run; `answers` are the ones that are finished, of which
    the first `carried` were finished in an earlier step."""

    number: int
    prompt: Prompt
    outcome: Outcome
    answers: tuple[Sample, ...]
    carried: int = 0

    @property
    def new_answers(self) -> tuple[Sample, ...]:
        """The answers that this step finished."""
        return self.answers[self.carried :]

    @property
    def tokens(self) -> int:
        """Tokens of the answers that this step finished."""
        return sum(len(sample.token_ids) for sample in self.new_answers)


def batch_stats(draws: Sequence[Draw], stopped: Sequence[int] = ()) -> dict[str, float]:
    """Metrics of one batch from all draws of its step; means over nothing are NaN.

    `stopped` are the tokens that answers had when they lost to faster ones (`selection: arrival`).

    `drawn = kept + all_right + all_wrong + failed + requeued` and `requeued = surplus + aborted` hold always: no prompt
    is lost. Counts are of groups; `answers/<outcome>` and `tokens/<outcome>` are answers that the step finished and
    their tokens, and the tokens of all outcomes add up to `generated_tokens`. `overhead` is the generated tokens over
    those that are trained on, `acceptance` the share of kept groups among those not requeued. `accuracy`, `no_answer`,
    `bad_gold` and `bad_reward` (counts of answers) are over complete groups that were not requeued; `response_length`
    (mean, in tokens), `response_length_max`, `truncated` (share) and `reward` (mean) over the kept ones. `length_ratio`
    is the mean length of kept over that of all complete ones, and of stopped ones as far as they came: far below 1
    when selection prefers short ones.
    """
    counts = {outcome: float(sum(draw.outcome == outcome for draw in draws)) for outcome in OUTCOMES}
    requeued = counts["surplus"] + counts["aborted"]
    samples = [sample for draw in draws if draw.outcome in COMPLETE for sample in draw.answers]
    kept = [sample for draw in draws if draw.outcome == "kept" for sample in draw.answers]
    lengths = [len(sample.token_ids) for sample in kept]
    return {
        "drawn": float(len(draws)),
        **counts,
        "requeued": requeued,
        "acceptance": _ratio(counts["kept"], len(draws) - requeued),
        "accuracy": _mean(sample.correct for sample in samples),
        "no_answer": float(sum(sample.reason == "no_answer" for sample in samples)),
        "bad_gold": float(sum(sample.reason == "bad_gold" for sample in samples)),
        "bad_reward": float(sum(sample.reason == "bad_reward" for sample in samples)),
        "length_ratio": _ratio(_mean(lengths), _mean([*(len(sample.token_ids) for sample in samples), *stopped])),
        "response_length": _mean(lengths),
        "response_length_max": float(max(lengths, default=math.nan)),
        "truncated": _mean(sample.finish_reason == "length" for sample in kept),
        "reward": _mean(sample.reward for sample in kept),
        **_cost(draws),
        "overhead": _ratio(sum(draw.tokens for draw in draws), sum(lengths)),
    }


def _cost(draws: Sequence[Draw]) -> dict[str, float]:
    answers, tokens = dict.fromkeys(OUTCOMES, 0), dict.fromkeys(OUTCOMES, 0)
    for draw in draws:
        answers[draw.outcome] += len(draw.new_answers)
        tokens[draw.outcome] += draw.tokens
    return {
        **{f"answers/{outcome}": float(count) for outcome, count in answers.items()},
        **{f"tokens/{outcome}": float(count) for outcome, count in tokens.items()},
        "generated_tokens": float(sum(tokens.values())),
    }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return _ratio(sum(numbers), len(numbers))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
