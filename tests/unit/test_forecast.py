"""Acceptance of groups: the spec's figures, the size that reaches an acceptance, and how many are in flight."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.history import GroupResult, Place, PromptHistory, Verdict
from dapo_megatron.rollout.forecast import LEAST_ACCEPTANCE, Coverage, Forecast, expected_acceptance, group_size


@pytest.mark.parametrize(
    ("pass_rate", "size", "expected"),
    [(0.5, 4, 0.875), (0.5, 16, 0.9999694824), (0.1, 8, 0.56953278), (0.9, 8, 0.56953278), (0.0, 4, 0), (1.0, 4, 0)],
)
def test_expected_acceptance(pass_rate: float, size: int, expected: float) -> None:
    assert expected_acceptance(pass_rate, size) == pytest.approx(expected, abs=1e-9)


def adaptive(acceptance: float = 0.9) -> RolloutConfig:
    rule = {"sizes": [4, 8, 16], "acceptance": acceptance}
    return RolloutConfig.model_validate({"samples_per_prompt": 16, "adaptive_group": rule})


@pytest.mark.parametrize(
    ("accuracy", "acceptance", "size"),
    [
        (0.5, 0.87, 4),  # 0.875
        (0.5, 0.875, 4),
        (0.5, 0.88, 8),
        (0.25, 0.89, 8),  # 0.8999 at 8
        (0.25, 0.9, 16),
        (0.75, 0.9, 16),
        (0.1, 0.9, 16),  # 0.8147 even at 16: the largest all the same
        (0.0, 0.9, 16),
        (None, 0.5, 16),  # nothing known
    ],
)
def test_the_smallest_group_that_reaches_the_acceptance_is_taken(
    accuracy: float | None, acceptance: float, size: int
) -> None:
    assert group_size(adaptive(acceptance), accuracy) == size
    assert group_size(RolloutConfig(samples_per_prompt=5), accuracy) == 5


def history(*verdicts: Verdict) -> PromptHistory:
    """Prompt i had one group of 8 answers with the i-th verdict."""
    right = {"solved": 8, "mixed": 4, "unsolvable": 0}
    results = [GroupResult(right[verdict], 8, verdict) for verdict in verdicts]
    found = PromptHistory()
    found.add_step([Place(i, i, 0) for i in range(len(verdicts))], results)
    return found


def test_a_prompt_with_a_history_has_its_own_forecast_and_others_the_running_one() -> None:
    known = history("solved", "unsolvable", "mixed", "mixed")
    forecast = Forecast(known, size=8, filtered=True)
    assert forecast(0) == pytest.approx(expected_acceptance((8 + 8 * 0.5) / 16, 8), abs=1e-12)
    assert forecast(1) == pytest.approx(expected_acceptance((0 + 8 * 0.5) / 16, 8), abs=1e-12)
    assert forecast(2) == pytest.approx(expected_acceptance(0.5, 8), abs=1e-12)
    assert forecast(9) == (1 + 2) / (1 + 4)
    assert Forecast(known, 8, True, mixed=0, groups=5)(9) == (1 + 2) / (1 + 4 + 5)


def test_without_filtering_every_group_counts_and_no_prompt_is_ever_written_off() -> None:
    hopeless = history(*["unsolvable"] * 5000)
    assert Forecast(hopeless, 8, filtered=False)(0) == 1.0
    assert Forecast(hopeless, 8, filtered=True)(0) == LEAST_ACCEPTANCE
    assert Forecast(hopeless, 8, filtered=True)(9999) == LEAST_ACCEPTANCE
    assert Forecast(PromptHistory(), 8, filtered=True)(0) == 1.0


@given(st.lists(st.floats(1e-3, 1.0), max_size=200), st.integers(1, 20))
def test_coverage_is_the_mean_less_one_deviation(acceptances: list[float], needed: int) -> None:
    coverage = Coverage()
    for acceptance in acceptances:
        coverage.add(acceptance)
    deviation = math.sqrt(sum(p * (1 - p) for p in acceptances))
    margin = sum(acceptances) - deviation - needed
    if abs(margin) > 1e-9:
        assert coverage.reaches(needed) == (margin > 0)


def test_certain_groups_are_drawn_exactly() -> None:
    coverage = Coverage()
    for _ in range(3):
        assert not coverage.reaches(3)
        coverage.add(1.0)
    assert coverage.reaches(3)
