"""KL estimators: what they are on average, by enumerating every token that could have been sampled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.algorithm.kl import KLEstimator, kl_penalty

logits = st.lists(st.floats(-1.5, 1.5), min_size=3, max_size=3)  # log-ratios stay below 4.2 and k3 mostly uncapped


def gradient(value: Tensor, parameters: Tensor) -> Tensor:
    return torch.autograd.grad(value, parameters, retain_graph=True)[0]


@settings(deadline=None)
@given(logits, logits)
def test_expected_values_and_gradients_on_a_softmax(policy: list[float], reference: list[float]) -> None:
    parameters = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    log_pi = parameters.log_softmax(0)
    log_ref = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    pi, ref = log_pi.exp(), log_ref.exp()
    forward, backward = (pi * (log_pi - log_ref)).sum(), (ref * (log_ref - log_pi)).sum()
    k1, k2, k3 = (kl_penalty(log_pi, log_ref, estimator) for estimator in ("k1", "k2", "k3"))
    exact = {"rtol": 0.0, "atol": 1e-9}

    torch.testing.assert_close((pi * k1).sum(), forward, **exact)
    torch.testing.assert_close((pi * k2).sum(), (pi * (log_pi - log_ref) ** 2).sum() / 2, **exact)
    # In the loss the tokens are given: their probabilities weigh the gradients and have none themselves.
    weights = pi.detach()
    torch.testing.assert_close(gradient((weights * k1).sum(), parameters), torch.zeros(3).double(), **exact)
    torch.testing.assert_close(gradient((weights * k2).sum(), parameters), gradient(forward, parameters), **exact)
    if k3.max() < 10:
        torch.testing.assert_close((pi * k3).sum(), forward, **exact)
        torch.testing.assert_close(gradient((weights * k3).sum(), parameters), gradient(backward, parameters), **exact)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", 0.1487212707001282, -0.6487212707001282)],
)
def test_sign_and_slope_of_each(estimator: KLEstimator, value: float, slope: float) -> None:
    """log pi = -1.5 and log ref = -1, so that exp(-d) = 1.6487212707001282."""
    log_probs = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(log_probs, torch.tensor([-1.0], dtype=torch.float64), estimator)
    assert penalty.item() == pytest.approx(value, abs=1e-12)
    assert gradient(penalty.sum(), log_probs).item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-1000.0, -60.0, -3.0, 12.0, 60.0, 1000.0])
def test_k3_is_capped_and_then_has_no_gradient(log_ratio: float, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    penalty = kl_penalty(log_probs, torch.zeros(1, dtype=dtype), "k3")
    assert penalty.item() == 10.0
    assert gradient(penalty.sum(), log_probs).item() == 0.0


def test_k3_of_nearly_equal_policies_keeps_its_digits() -> None:
    """exp(-d) - 1 + d is d^2 / 2 there; 1 + 1e-4 has no digits left for it in fp32."""
    penalty = kl_penalty(torch.tensor([1e-3, -1e-3]), torch.zeros(2), "k3")
    assert penalty.tolist() == pytest.approx([5e-7, 5e-7], rel=1e-3)
    assert kl_penalty(torch.zeros(2), torch.zeros(2), "k3").tolist() == [0.0, 0.0]
