"""Estimators of the divergence from a reference policy, from the log-probs of sampled tokens alone."""

from typing import Literal, assert_never

from torch import Tensor

from dapo_megatron.algorithm.policy_loss import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3"]

MAX_K3 = 10.0
"""k3 grows exponentially where the policy left a token that the reference likes: one token could outweigh a batch."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(pi || ref) at each token from d = log pi - log ref of the token that was sampled.

        k1  d
        k2  d^2 / 2
        k3  exp(-d) - 1 + d, at most 10; -d is clamped to [-20, 20] before exp

    (J. Schulman, "Approximating KL divergence", 2020; k3 is also arXiv 2402.03300, eq. 4.) For tokens sampled from
    pi, k1 and the uncapped k3 have the expectation KL(pi || ref).

    The gradient with respect to `log_probs` is 1, d and 1 - exp(-d), and exactly 0 where k3 is capped. Averaged over
    tokens of pi, which is what a term of the loss follows, the gradient of k1 is 0, that of k2 is the gradient of
    KL(pi || ref), and that of the uncapped k3 is the gradient of KL(ref || pi).

    Args:
        log_probs: floating [T], of the policy being trained.
        ref_log_probs: floating [T], of the frozen reference policy, for the same tokens.
        estimator: see above.

    Returns:
        The estimates, floating [T].
    """
    log_ratio = log_probs - ref_log_probs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        # Unclamped, exp would overflow and the cap's gradient of 0 times infinity would not be a number.
        inverse_ratio_less_one = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()
        return (inverse_ratio_less_one + log_ratio).clamp(max=MAX_K3)
    assert_never(estimator)
