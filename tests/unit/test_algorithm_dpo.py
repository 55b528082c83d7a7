"""DPO: the loss by hand, and its gradient from the advantages in place of the loss."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.dpo import dpo
from dapo_megatron.algorithm.policy_loss import policy_loss
from dapo_megatron.config.algorithm import AlgorithmConfig

EXACT = {"rtol": 0.0, "atol": 1e-12}
CHOSEN, REJECTED = torch.tensor([4, 1, 2]), torch.tensor([0, 5, 3])  # pairs lie in any order


def sums(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reference_loss(log_probs: Tensor, reference: Tensor, beta: float, smoothing: float) -> Tensor:
    """Eq. 7 as it is printed, with smoothed labels; mean over pairs."""
    ratios = log_probs - reference
    z = beta * ratios[CHOSEN] - beta * ratios[REJECTED]
    return -((1 - smoothing) * logsigmoid(z) + smoothing * logsigmoid(-z)).mean()


def test_golden_pair_by_hand() -> None:
    # The chosen answer gained 3 nats on the reference, the rejected one lost 2: z = 0.1 x 5.
    found = dpo(sums(-7.0, -12.0), sums(-10.0, -10.0), torch.tensor([0]), torch.tensor([1]), beta=0.1)
    sigmoid = 1 / (1 + math.exp(0.5))  # of -z
    torch.testing.assert_close(found.margins, sums(0.5), **EXACT)
    torch.testing.assert_close(found.losses, sums(math.log(1 + math.exp(-0.5))), **EXACT)
    torch.testing.assert_close(found.advantages, sums(0.2 * sigmoid, -0.2 * sigmoid), **EXACT)


def test_policy_that_is_the_reference() -> None:
    start = sums(-3.0, -8.0)
    for smoothing in (0.0, 0.2):
        found = dpo(start, start, torch.tensor([0]), torch.tensor([1]), beta=0.1, label_smoothing=smoothing)
        torch.testing.assert_close(found.losses, sums(math.log(2)), **EXACT)  # whatever the labels
        torch.testing.assert_close(found.advantages, sums(1, -1) * 0.1 * (1 - 2 * smoothing), **EXACT)


def test_smoothed_labels_have_their_least_loss_where_the_odds_are_those_of_the_labels() -> None:
    z = math.log(0.8 / 0.2)
    found = dpo(sums(z / 0.5, 0.0), sums(0.0, 0.0), torch.tensor([0]), torch.tensor([1]), beta=0.5, label_smoothing=0.2)
    torch.testing.assert_close(found.advantages, sums(0.0, 0.0), **EXACT)
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    torch.testing.assert_close(found.losses, sums(entropy), **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
@pytest.mark.parametrize("beta", [0.05, 0.1, 2.0])
def test_surrogate_has_the_gradient_of_the_loss(beta: float, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(int(1000 * (beta + smoothing)))
    log_probs, reference = torch.randn(2, 6, dtype=torch.float64, generator=generator) * 5 - 20
    log_probs.requires_grad_()
    loss = reference_loss(log_probs, reference, beta, smoothing)
    (expected,) = torch.autograd.grad(loss, log_probs)
    found = dpo(log_probs.detach(), reference, CHOSEN, REJECTED, beta=beta, label_smoothing=smoothing)
    torch.testing.assert_close(found.losses.mean(), loss.detach(), **EXACT)
    (surrogate,) = torch.autograd.grad(-(found.advantages * log_probs).mean(), log_probs)
    torch.testing.assert_close(surrogate, expected, **EXACT)
    assert expected.abs().max() > 1e-6


def test_advantages_are_finite_differences_of_the_losses() -> None:
    log_probs, reference = (
        sums(-20.0, -18.5, -25.0, -19.0, -22.0, -21.0),
        sums(-21.0, -18.0, -25.0, -20.0, -20.0, -21.5),
    )

    def mean_loss(at: Tensor) -> Tensor:
        return dpo(at, reference, CHOSEN, REJECTED, beta=0.3, label_smoothing=0.1).losses.mean()

    found = dpo(log_probs, reference, CHOSEN, REJECTED, beta=0.3, label_smoothing=0.1).advantages
    step = 1e-5
    for response, direction in enumerate(torch.eye(6, dtype=torch.float64) * step):
        slope = (mean_loss(log_probs + direction) - mean_loss(log_probs - direction)) / (2 * step)
        torch.testing.assert_close(slope, -found[response] / 6, rtol=0.0, atol=1e-10)


def test_extreme_margins_stay_finite() -> None:
    found = dpo(sums(-1e4, 0.0, 0.0, -1e4), sums(0, 0, 0, 0), torch.tensor([0, 2]), torch.tensor([1, 3]), beta=1.0)
    torch.testing.assert_close(found.losses, sums(1e4, 0.0), **EXACT)
    torch.testing.assert_close(found.advantages, sums(2.0, -2.0, 0.0, 0.0), **EXACT)


def test_tokens_of_the_policy_loss_add_up_to_the_gradient_of_the_pairs() -> None:
    """The whole way: token log-probs, advantages by response, policy_loss and aggregation, cut into two parts."""
    generator = torch.Generator().manual_seed(3)
    responses = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 5])
    tokens, reference = -torch.rand(2, 10, dtype=torch.float64, generator=generator) * 4
    tokens.requires_grad_()

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(6, dtype=torch.float64).index_add(0, responses, values)

    (expected,) = torch.autograd.grad(reference_loss(summed(tokens), summed(reference), 0.1, 0.0), tokens)
    advantages = dpo(summed(tokens.detach()), summed(reference), CHOSEN, REJECTED, beta=0.1).advantages[responses]
    algorithm = AlgorithmConfig(loss="dpo", aggregation="sequence_sum")
    total = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 10)):
        mask = torch.ones(part.stop - part.start, dtype=torch.bool)
        losses = policy_loss(
            tokens[part], tokens.detach()[part], advantages[part], mask, responses[part], algorithm
        ).losses
        total = total + aggregate(losses, mask, responses[part], "sequence_sum", num_responses=6)
    (found,) = torch.autograd.grad(total, tokens)
    torch.testing.assert_close(found, expected, **EXACT)
