"""Soft overlong punishment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm.overlong import brevity_bonus, overlong_penalty

TABLE = {0: 0, 79: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 140: -1}
PAST_MAX = {0: 0, 80: 0, 100: 0, 101: -0.05, 110: -0.5, 119: -0.95, 120: -1, 121: -1, 140: -1}


@pytest.mark.parametrize(("length", "penalty"), TABLE.items())
def test_table(length: int, penalty: float) -> None:
    assert overlong_penalty([length], 100, 20)[0] == pytest.approx(penalty, abs=1e-12)


@pytest.mark.parametrize(("length", "penalty"), PAST_MAX.items())
def test_table_of_the_shifted_variant(length: int, penalty: float) -> None:
    assert overlong_penalty([length], 100, 20, shift="past_max")[0] == pytest.approx(penalty, abs=1e-12)
    assert overlong_penalty([length], 100, 20, 0.5, "past_max")[0] == pytest.approx(penalty / 2, abs=1e-12)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(0, 500))
def test_the_shift_moves_the_penalty_by_the_cache(max_tokens: int, cache: int) -> None:
    lengths = np.arange(2 * max_tokens)
    shifted = overlong_penalty(lengths + cache, max_tokens, cache, shift="past_max")
    assert shifted.tolist() == overlong_penalty(lengths, max_tokens, cache).tolist()


def test_brevity_is_for_right_answers() -> None:
    lengths, correct = [0, 25, 25, 100, 110], [True, True, False, True, True]
    bonus = brevity_bonus(lengths, correct, 100, 0.2)
    assert bonus == pytest.approx([0.2, 0.15, 0.0, 0.0, -0.02], abs=1e-12)
    assert bonus.dtype == np.float64
    assert brevity_bonus(lengths, correct, 100, 0.0).tolist() == [0.0] * 5
    assert brevity_bonus(25, True, 100, 1.0).shape == ()


def test_factor_scales_and_bounds() -> None:
    assert overlong_penalty([90, 140], 100, 20, factor=0.5) == pytest.approx([-0.25, -0.5], abs=1e-12)


def test_without_a_cache_there_is_no_punishment() -> None:
    penalty = overlong_penalty([0, 100, 101, 10_000], 100, 0)
    assert penalty.tolist() == [0, 0, 0, 0]
    assert penalty.dtype == np.float64


def test_unpunished_is_zero_and_not_minus_zero() -> None:
    assert not np.signbit(overlong_penalty([0, 80], 100, 20)).any()


def test_shapes_and_kinds() -> None:
    assert overlong_penalty(90, 100, 20).shape == ()
    assert overlong_penalty(np.array([[90, 91]], np.int32), 100, 20).shape == (1, 2)
    assert overlong_penalty([], 100, 20).shape == (0,)


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_falls_with_length_within_its_bounds(max_tokens: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, max_tokens))
    penalty = overlong_penalty(np.arange(2 * max_tokens), max_tokens, cache)
    assert (np.diff(penalty) <= 0).all()
    assert penalty[max_tokens - cache] == 0
    assert penalty[max_tokens] == penalty.min() == -1
