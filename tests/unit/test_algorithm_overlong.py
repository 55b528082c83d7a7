"""Soft overlong punishment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm.overlong import overlong_penalty

TABLE = {0: 0, 79: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 140: -1}


@pytest.mark.parametrize(("length", "penalty"), TABLE.items())
def test_table(length: int, penalty: float) -> None:
    assert overlong_penalty([length], 100, 20)[0] == pytest.approx(penalty, abs=1e-12)


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
