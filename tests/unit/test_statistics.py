"""Intervals of accuracies and gains, against textbook values and against their own promise: coverage."""

import numpy as np
import pytest
from scipy import stats

from dapo_megatron.evaluation.statistics import accuracy_interval, paired_gain_interval


def test_accuracy_interval_is_students_t_over_problems() -> None:
    scores = [0.0, 1.0, 0.5, 0.75, 1.0, 0.25, 0.0, 1.0]
    expected = stats.ttest_1samp(scores, 0.0).confidence_interval(0.9)
    assert accuracy_interval(scores, 0.9) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_accuracy_interval_textbook_value() -> None:
    # Mean 0.5, sample deviation sqrt(1/3), t(3 degrees, 0.975) = 3.182446: the margin 0.918694 leaves [0, 1].
    assert accuracy_interval([0, 0, 1, 1], 0.95) == (0.0, 1.0)
    low, high = accuracy_interval([0, 1] * 128, 0.95)
    assert (low, high) == pytest.approx((0.5 - 0.0616617, 0.5 + 0.0616617), abs=1e-6)


@pytest.mark.parametrize(("score", "expected"), [(0.0, (0.0, 0.0143064)), (1.0, (0.9856936, 1.0))])
def test_equal_scores_still_have_an_interval(score: float, expected: tuple[float, float]) -> None:
    interval = accuracy_interval([score] * 256, 0.95)
    assert interval == pytest.approx(expected, abs=1e-6)
    exact = stats.binomtest(int(score * 256), 256).proportion_ci(0.95, method="exact")
    assert interval == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_one_problem_says_little() -> None:
    low, high = accuracy_interval([0.5], 0.95)
    assert low < 0.05
    assert high > 0.95
    assert paired_gain_interval([0.0], [1.0], 0.95) == (-1.0, 1.0)


def test_gain_is_paired_by_problem() -> None:
    before = [0.1, 0.9, 0.5, 0.3, 0.7]
    after = [0.2, 1.0, 0.6, 0.4, 0.75]
    expected = stats.ttest_rel(after, before).confidence_interval(0.95)
    low, high = paired_gain_interval(before, after, 0.95)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert low > 0.05  # unpaired, the spread between problems would drown the gain
    assert paired_gain_interval(before, after[::-1], 0.95)[0] < 0


def test_coverage_is_what_it_says() -> None:
    draws = np.random.default_rng(0).binomial(4, 0.3, size=(2000, 64)) / 4
    intervals = np.array([accuracy_interval(scores, 0.9) for scores in draws.tolist()])
    covered = np.mean((intervals[:, 0] <= 0.3) & (intervals[:, 1] >= 0.3))
    assert covered == pytest.approx(0.9, abs=0.02)


def test_results_are_plain_floats() -> None:
    for interval in (accuracy_interval([0, 1, 1], 0.95), accuracy_interval([1, 1], 0.95)):
        assert all(type(bound) is float for bound in interval)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, float("nan")])
def test_confidence_is_a_probability(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        accuracy_interval([0.0, 1.0], confidence)


def test_bad_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        accuracy_interval([], 0.95)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        accuracy_interval([0.5, 1.5], 0.95)
    with pytest.raises(ValueError, match="same problems: 2 before, 1 after"):
        paired_gain_interval([0.0, 1.0], [1.0], 0.95)
