"""How much better a response was than expected: relative to its group, to the batch, or to a critic."""

from typing import Literal, Protocol

import torch
from torch import Tensor

from dapo_megatron.algorithm.group_filter import EQUAL_SCORES

GroupEstimator = Literal["group_norm", "group_mean", "leave_one_out", "min_max"]
Deviation = Literal["sample", "population"]
Over = Literal["tokens", "responses"]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""
WHITENING_EPSILON = 1e-8
"""Added to a variance before dividing by its root."""


class AdvantageOptions(Protocol):
    """What `response_advantages` reads (`dapo_megatron.config.algorithm.AdvantageConfig`)."""

    @property
    def estimator(self) -> Literal[GroupEstimator, "reinforce_pp", "gae"]:
        """What a reward is compared with."""

    @property
    def std(self) -> Deviation | None:
        """`group_norm` only: the divisor of the variance. None: sample."""

    @property
    def over(self) -> Over | None:
        """`reinforce_pp` only: what the statistics count. None: tokens."""


def response_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor, config: AdvantageOptions) -> Tensor:
    """Advantage of each response, the same for all of its tokens, by the configured estimator: floating [R].

    `rewards` is floating [R], `group_ids` and `lengths` (response tokens) are integer [R]: those of the whole rollout
    batch, on every rank, so that no statistic needs a reduction. See `group_advantages` and `reinforce_pp`.

    Raises:
        ValueError: for `gae`, which compares tokens with a critic's values.
    """
    if config.estimator == "gae":
        raise ValueError("gae needs a critic's values")
    if config.estimator == "reinforce_pp":
        return whitened(rewards, _weights(lengths, config.over or "tokens"))
    return group_advantages(rewards, group_ids, config.estimator, config.std or "sample")


def group_advantages(
    rewards: Tensor, group_ids: Tensor, estimator: GroupEstimator = "group_norm", std: Deviation = "sample"
) -> Tensor:
    """Compare each reward with those of its group, A_i = (R_i - mean) / divisor: floating [R].

        group_norm     divisor std + 1e-6 (arXiv 2503.14476, eq. 9)
        group_mean     divisor 1 (Dr.GRPO, arXiv 2503.20783)
        leave_one_out  divisor (G - 1) / G, which makes A_i = R_i - mean of the others (RLOO, arXiv 2402.14740)
        min_max        divisor max - min: rewards stretched to [0, 1], then centred

    A group whose rewards lie within 1e-6 of each other, such as a group of one, gets exactly 0: rounding in its mean
    would otherwise be blown up by the division. Responses without tokens count like any other.

    Args:
        rewards: floating [R].
        group_ids: integer [R]; members are found by id, wherever they stand.
        estimator: see above.
        std: `group_norm` only: variance with the divisor G - 1 (`sample`, the official recipe's) or G (`population`).

    Raises:
        KeyError: for an unknown `estimator` or `std`.
    """
    members, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)[1:]
    counts, per_group = sizes.to(rewards.dtype), rewards.new_zeros(len(sizes))
    highest = per_group.scatter_reduce(0, members, rewards, "amax", include_self=False)
    spread = highest - per_group.scatter_reduce(0, members, rewards, "amin", include_self=False)
    mean = per_group.index_add(0, members, rewards) / counts
    centred = rewards - mean[members]
    freedom = counts - {"sample": 1, "population": 0}[std]
    divisors = {
        "group_norm": (per_group.index_add(0, members, centred.square()) / freedom).sqrt() + STD_EPSILON,
        "group_mean": torch.ones_like(counts),
        "leave_one_out": (counts - 1) / counts,
        "min_max": spread,
    }
    return torch.where((spread > EQUAL_SCORES)[members], centred / divisors[estimator][members], 0.0)


def reinforce_pp(rewards: Tensor, lengths: Tensor, over: Over = "tokens") -> Tensor:
    """Whitened reward of its response for every token (REINFORCE++, arXiv 2501.03262): floating [T].

    A_t = (R - mean) / sqrt(sample variance + 1e-8), where mean and variance are those of the whole batch: over all
    its response tokens, so that a reward counts once per token (`tokens`), or over its responses, one without tokens
    included (`responses`). Equal rewards give exactly 0.

    `rewards` is floating [R]; `lengths`, integer [R], are the tokens of each response, T in all. The tokens of a
    response stand together, responses in the order of `rewards`.

    Raises:
        KeyError: for an unknown `over`.
    """
    return whitened(rewards, _weights(lengths, over)).repeat_interleave(lengths)


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    gamma: float,
    lam: float,
    whiten: bool = False,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates of a critic's values (arXiv 1506.02438, eq. 11 and 16): floating [T].

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t     = delta_t + gamma lambda A_(t+1)

    Within each response; V and A after its last token are 0, and its reward is r of its last token, beside what
    `token_rewards` give each token. A response without tokens has no place for its reward, which is then in no
    estimate.

    Args:
        rewards: floating [R].
        values: floating [T], V_t of the state in which token t is chosen. The tokens of a response stand together,
            responses in the order of `rewards`.
        lengths: integer [R], tokens of each response, T in all.
        gamma: discount per token.
        lam: lambda; 0 gives delta_t, 1 the discounted return minus V_t.
        whiten: also (A - mean) / sqrt(sample variance + 1e-8), over the T tokens.
        token_rewards: floating [T], such as those of steps (`algorithm.process_rewards.token_rewards`). None: all 0.
    """
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    remaining = ends - torch.arange(len(values), device=ends.device)  # tokens of the response from t on
    last = remaining == 1
    next_values = torch.where(last, 0.0, values.roll(-1))
    advantages = torch.where(last, rewards.repeat_interleave(lengths), 0.0) + gamma * next_values - values
    if token_rewards is not None:
        advantages = advantages + token_rewards
    # Before each round an advantage holds the first `reach` terms of its sum, and so does the one `reach` tokens on:
    # with it, twice as many. This takes log2(T) rounds instead of a loop over tokens.
    reach = 1
    while reach < len(values):
        later = torch.where(remaining > reach, advantages.roll(-reach), 0.0)
        advantages = advantages + (gamma * lam) ** reach * later
        reach *= 2
    return whitened(advantages, torch.ones_like(advantages)) if whiten else advantages


def _weights(lengths: Tensor, over: Over) -> Tensor:
    """How often each response's reward counts, integer [R]."""
    return {"tokens": lengths, "responses": torch.ones_like(lengths)}[over]


def whitened(values: Tensor, weights: Tensor) -> Tensor:
    """(x - mean) / sqrt(sample variance + 1e-8), floating [N].

    `values` are x, floating [N]; x_i counts `weights`_i times in mean and variance, integer or floating [N]. Both are
    taken of the differences from the first value: equal values then give exactly 0, while rounding in their mean
    would be blown up 10,000 times by the division. Where nothing counts there is no mean, and all are 0.
    """
    counts, shifted = weights.to(values.dtype), values - values[:1]
    total = counts.sum()
    centred = shifted - (counts * shifted).sum() / total
    variance = (counts * centred.square()).sum() / (total - 1).clamp(min=1)
    return torch.where(total > 0, centred / (variance + WHITENING_EPSILON).sqrt(), 0.0)
