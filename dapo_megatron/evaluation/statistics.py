"""Confidence intervals of accuracies and gains. The unit is the problem: answers to one problem are not independent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, stdtrit

Interval = tuple[float, float]


def accuracy_interval(scores: Sequence[float], confidence: float) -> Interval:
    """Confidence interval of the mean score over problems, (low, high) within [0, 1].

    `scores` holds each problem's mean score in [0, 1], [P]. The interval is Student's t over problems. Where all
    scores are equal, which says nothing about their spread, it is the exact binomial one (Clopper and Pearson,
    1934) of P trials: 0 of 256 right gives (0, 0.014), not (0, 0).

    Raises ValueError without scores, for a score outside [0, 1] and for a confidence outside (0, 1).
    """
    values = _checked(scores, confidence)
    if values.min() < 0 or values.max() > 1:
        raise ValueError("scores must lie in [0, 1]")
    if np.ptp(values) == 0:
        return _binomial_interval(values.sum(), len(values), confidence)
    low, high = _t_interval(values, confidence)
    return max(0.0, low), min(1.0, high)


def paired_gain_interval(before: Sequence[float], after: Sequence[float], confidence: float) -> Interval:
    """Confidence interval of the mean of after - before, paired by problem: (low, high) within [-1, 1].

    Both hold each problem's mean score in [0, 1], [P], the problems in the same order. The interval is Student's t
    over the P differences, so a problem's difficulty cancels. One problem alone gives (-1, 1).

    Raises ValueError when the lengths differ, without scores and for a confidence outside (0, 1).
    """
    if len(before) != len(after):
        raise ValueError(f"paired scores must be of the same problems: {len(before)} before, {len(after)} after")
    gains = _checked(after, confidence) - _checked(before, confidence)
    if len(gains) == 1:
        return -1.0, 1.0
    low, high = _t_interval(gains, confidence)
    return max(-1.0, low), min(1.0, high)


def _checked(scores: Sequence[float], confidence: float) -> NDArray[np.float64]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    if len(scores) == 0:
        raise ValueError("an interval needs at least one problem")
    return np.asarray(scores, dtype=np.float64)


def _t_interval(values: NDArray[np.float64], confidence: float) -> Interval:
    """Mean +- t * sample standard deviation / sqrt(P), for P of at least 2."""
    quantile = stdtrit(len(values) - 1, (1 + confidence) / 2)
    margin = quantile * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - margin), float(values.mean() + margin)


def _binomial_interval(successes: float, trials: int, confidence: float) -> Interval:
    """Clopper-Pearson; `successes` may be a fraction, as a sum of mean scores is."""
    tail, failures = (1 - confidence) / 2, trials - successes
    low = betaincinv(successes, failures + 1, tail) if successes > 0 else 0.0
    high = betaincinv(successes + 1, failures, 1 - tail) if failures > 0 else 1.0
    return float(low), float(high)
