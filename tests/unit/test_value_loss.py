"""The critic's loss: values by hand, and its gradient."""

import math

import pytest
import torch

from dapo_megatron.algorithm.value_loss import value_loss

# V, V_old, R -> loss with c = 0.5, whether the clip acts, loss without a clip
GOLDEN = [
    ((0.25, 0.0, 1.0), 0.28125, False, 0.28125),  # within the range
    ((1.0, 0.0, 1.0), 0.125, True, 0.0),  # right, but further than c from V_old: as at 0.5
    ((0.75, 0.0, 2.0), 1.125, True, 0.78125),  # on the way
    ((-0.75, 0.0, 2.0), 3.78125, False, 3.78125),  # the wrong way: it is to come back
    ((-1.0, 0.0, -2.0), 1.125, True, 0.5),  # downwards
    ((0.5, 0.0, 1.0), 0.125, False, 0.125),  # just at the limit
    ((1.25, 0.0, 1.0), 0.125, True, 0.03125),  # past R, still nearer to it than the limit
    ((2.0, 0.0, 1.0), 0.5, False, 0.5),  # far past R: it is to come back
    ((3.0, 2.0, 2.0), 0.5, False, 0.5),  # away from a value that was right
]


def columns(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, old_values, returns = torch.tensor([row[0] for row in GOLDEN], dtype=dtype).unbind(1)
    return values, old_values, returns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_values(dtype: torch.dtype) -> None:
    """All numbers are exact in binary."""
    mask = torch.ones(len(GOLDEN), dtype=torch.bool)
    losses, clipped = value_loss(*columns(dtype), mask, 0.5)
    assert losses.tolist() == [row[1] for row in GOLDEN]
    assert clipped.tolist() == [row[2] for row in GOLDEN]
    assert (losses.dtype, clipped.dtype) == (dtype, torch.bool)


def test_without_clip() -> None:
    losses, clipped = value_loss(*columns(), torch.ones(len(GOLDEN), dtype=torch.bool), None)
    assert losses.tolist() == [row[3] for row in GOLDEN]
    assert not clipped.any()


@pytest.mark.parametrize("clip", [0.5, 0.2, None])
def test_gradient_is_that_of_finite_differences(clip: float | None) -> None:
    torch.manual_seed(0)
    old_values, returns = torch.randn(2, 500, dtype=torch.float64)
    values = old_values + 0.5 * torch.randn(500, dtype=torch.float64)
    values.requires_grad_()
    mask = torch.rand(500) > 0.1
    losses, clipped = value_loss(values, old_values, returns, mask, clip)
    losses.sum().backward()
    step = 1e-5
    with torch.no_grad():
        above, below = (value_loss(values + d, old_values, returns, mask, clip)[0] for d in (step, -step))
    assert values.grad is not None
    assert torch.allclose(values.grad, (above - below) / (2 * step), rtol=0, atol=1e-9)
    free = mask & ~clipped
    assert torch.equal(values.grad[free], (values - returns).detach()[free])
    assert not values.grad[~free].any()
    assert bool(clipped.any()) == (clip is not None)


def test_masked_positions_have_no_effect() -> None:
    values = torch.tensor([1.0, math.nan, 0.5], requires_grad=True)
    old_values, returns = torch.tensor([0.0, math.inf, 0.5]), torch.tensor([1.0, math.nan, 1.0])
    losses, clipped = value_loss(values, old_values, returns, torch.tensor([True, False, True]), 0.5)
    assert losses.tolist() == [0.125, 0.0, 0.125]
    assert clipped.tolist() == [True, False, False]
    losses.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0, -0.5]


def test_no_tokens() -> None:
    empty = torch.empty(0)
    losses, clipped = value_loss(empty, empty, empty, torch.empty(0, dtype=torch.bool), 0.2)
    assert losses.shape == clipped.shape == (0,)
