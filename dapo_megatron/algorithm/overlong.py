"""Rewards for length: the soft overlong punishment (eq. 13) and the brevity bonus."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Shift = Literal["before_max", "past_max"]


def overlong_penalty(
    lengths: ArrayLike, max_tokens: int, cache_tokens: int, factor: float = 1.0, shift: Shift = "before_max"
) -> NDArray[np.float64]:
    """Reward that a response loses by its length, float64 of the shape of `lengths`, between -factor and 0.

    `lengths` counts generated tokens, the end token included. With L = max_tokens and C = cache_tokens the value is

        0                  n <= L - C
        ((L - C) - n) / C  L - C < n <= L
        -1                 n > L

    times `factor` (arXiv 2503.14476, eq. 13). With the shift `past_max` the same slope begins at L: -(n - L) / C up
    to L + C, and -1 beyond. C = 0 switches the punishment off.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if cache_tokens == 0:
        return np.zeros_like(tokens)
    unpunished = {"before_max": max_tokens - cache_tokens, "past_max": max_tokens}[shift]
    over = np.clip((tokens - unpunished) / cache_tokens, 0.0, 1.0)
    return np.asarray(0.0 - factor * over)  # 0.0 - x, where -x would give -0.0 for short responses


def brevity_bonus(lengths: ArrayLike, correct: ArrayLike, max_tokens: int, weight: float) -> NDArray[np.float64]:
    """Reward that a right answer gains by being short: weight x (1 - n / max_tokens); 0 for a wrong one.

    `lengths` counts generated tokens, the end token included, and `correct` (bool) has its shape, which is also that
    of the result, float64. Past `max_tokens` the bonus is negative.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return np.asarray(np.where(correct, weight * (1.0 - tokens / max_tokens), 0.0))
