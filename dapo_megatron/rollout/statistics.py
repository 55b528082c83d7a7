"""Metrics of a rollout."""

import math
from collections.abc import Iterable, Sequence

from dapo_megatron.types import Group


def batch_stats(
    *, drawn: Sequence[Group | None], kept: Sequence[Group], surplus: int, aborted: int
) -> dict[str, float]:
    """Metrics of one batch; means over nothing are NaN.

    Args:
        drawn: the groups of every draw up to the last that is trained on, in draw order (None: failed).
        kept: those that are trained on.
        surplus: groups that finished after that, whose prompts went back to the head of the queue.
        aborted: groups stopped before they finished, whose prompts went back too.

    `drawn = kept + all_right + all_wrong + failed + requeued` holds always: no prompt is lost. Counts are of groups.
    `accuracy`, `no_answer` and `bad_gold` (counts of answers) are over complete drawn groups; `response_length`
    (mean, in tokens), `response_length_max`, `truncated` (share) and `reward` (mean) over the kept ones;
    `length_ratio` is the mean length of kept over that of drawn answers, far below 1 when selection prefers short ones.
    """
    complete = [group for group in drawn if group is not None]
    kept_draws = {group.draw for group in kept}
    dropped = [group for group in complete if group.draw not in kept_draws]
    all_right = sum(all(sample.correct for sample in group.samples) for group in dropped)
    samples = [sample for group in complete for sample in group.samples]
    kept_samples = [sample for group in kept for sample in group.samples]
    lengths = [len(sample.token_ids) for sample in kept_samples]
    return {
        "drawn": float(len(drawn) + surplus + aborted),
        "kept": float(len(kept)),
        "all_right": float(all_right),
        "all_wrong": float(len(dropped) - all_right),
        "failed": float(len(drawn) - len(complete)),
        "surplus": float(surplus),
        "aborted": float(aborted),
        "requeued": float(surplus + aborted),
        "accuracy": _mean(sample.correct for sample in samples),
        "no_answer": float(sum(sample.reason == "no_answer" for sample in samples)),
        "bad_gold": float(sum(sample.reason == "bad_gold" for sample in samples)),
        "length_ratio": _mean(lengths) / _mean(len(sample.token_ids) for sample in samples),
        "response_length": _mean(lengths),
        "response_length_max": float(max(lengths, default=math.nan)),
        "truncated": _mean(sample.finish_reason == "length" for sample in kept_samples),
        "reward": _mean(sample.reward for sample in kept_samples),
    }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan
