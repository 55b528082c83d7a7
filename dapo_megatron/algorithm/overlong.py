"""Soft overlong punishment (eq. 13)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def overlong_penalty(
    lengths: ArrayLike, max_tokens: int, cache_tokens: int, factor: float = 1.0
) -> NDArray[np.float64]:
    """Reward that a response loses by its length, float64 of the shape of `lengths`, between -factor and 0.

    `lengths` counts generated tokens, the end token included. With L = max_tokens and C = cache_tokens the value is

        0                  n <= L - C
        ((L - C) - n) / C  L - C < n <= L
        -1                 n > L

    times `factor` (arXiv 2503.14476, eq. 13). C = 0 switches the punishment off.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if cache_tokens == 0:
        return np.zeros_like(tokens)
    over = np.clip((tokens - (max_tokens - cache_tokens)) / cache_tokens, 0.0, 1.0)
    return np.asarray(0.0 - factor * over)  # 0.0 - x, where -x would give -0.0 for short responses
