"""Which groups carry a learning signal (eq. 11)."""

from collections.abc import Iterable

EQUAL_SCORES = 1e-6
"""Scores of a group that lie no further apart than this count as equal."""


def mixed_groups(scores: Iterable[float], group_ids: Iterable[int]) -> dict[int, bool]:
    """Say for every group whether its scores differ, in order of first appearance.

    `scores` and `group_ids` have one entry per response; members are found by id, wherever they stand. A score is
    the response's correctness, never its shaped reward: an all-wrong group whose lengths differ has no signal.
    For right or wrong answers the result is 0 < number right < G (arXiv 2503.14476, eq. 11); for other scores it
    is max - min > 1e-6.

    Raises ValueError when the two lengths differ.
    """
    low: dict[int, float] = {}
    high: dict[int, float] = {}
    for score, group in zip(map(float, scores), map(int, group_ids), strict=True):
        low[group] = min(low.get(group, score), score)
        high[group] = max(high.get(group, score), score)
    return {group: high[group] - low[group] > EQUAL_SCORES for group in low}
