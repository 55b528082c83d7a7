"""From losses of tokens to one loss, in every mode."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dapo_megatron.algorithm.aggregation import Aggregation, aggregate, count_tokens
from dapo_megatron.config.algorithm import AlgorithmConfig

MODES: tuple[Aggregation, ...] = get_args(Aggregation)
every_mode = pytest.mark.parametrize("mode", MODES)


def test_the_configuration_offers_these_modes() -> None:
    assert get_args(AlgorithmConfig.model_fields["aggregation"].annotation) == MODES


# Responses of 2 and 6 tokens with losses of 1 and 0, L_max 8; then the same without the second.
TABLE = [("token_mean", 0.25, 1.0), ("sequence_mean", 0.5, 1.0), ("sequence_sum_norm", 0.125, 0.25)]


@pytest.mark.parametrize(("mode", "both", "first_only"), TABLE)
def test_table(mode: Aggregation, both: float, first_only: float) -> None:
    responses = torch.tensor([0] * 2 + [1] * 6)
    per_token, mask = (responses == 0).float(), torch.ones(8, dtype=torch.bool)
    assert aggregate(per_token, mask, responses, mode, max_tokens=8).item() == both
    assert aggregate(per_token, responses == 0, responses, mode, max_tokens=8).item() == first_only


@every_mode
def test_gradients_are_the_weights_of_the_tokens(mode: Aggregation) -> None:
    """Responses 7 and 3 of 2 and 3 unmasked tokens, interleaved; response 5 is masked altogether."""
    responses = torch.tensor([7, 3, 5, 3, 7, 3, 7])
    mask = torch.tensor([True, True, False, True, True, True, False])
    per_token = torch.arange(7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(aggregate(per_token, mask, responses, mode, max_tokens=10), per_token)
    weights = {
        "token_mean": [1 / 5, 1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 0],
        "sequence_mean": [1 / 4, 1 / 6, 0, 1 / 6, 1 / 4, 1 / 6, 0],
        "sequence_sum_norm": [1 / 20, 1 / 20, 0, 1 / 20, 1 / 20, 1 / 20, 0],
        "sequence_sum": [1 / 2, 1 / 2, 0, 1 / 2, 1 / 2, 1 / 2, 0],
    }
    assert gradient.tolist() == pytest.approx(weights[mode], abs=1e-15)


@every_mode
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_masked_tokens_have_no_effect_whatever_they_hold(mode: Aggregation, value: float) -> None:
    mask, responses = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 1, -7])
    per_token = torch.tensor([2.0, value, 4.0, value], requires_grad=True)
    loss = aggregate(per_token, mask, responses, mode, max_tokens=1)
    (gradient,) = torch.autograd.grad(loss, per_token)
    assert loss.item() == 3.0
    assert gradient.tolist() == [0.5, 0, 0.5, 0]


@every_mode
@pytest.mark.parametrize("size", [0, 3])
def test_empty_batches_give_zero(mode: Aggregation, size: int) -> None:
    per_token, mask = torch.full((size,), math.nan, requires_grad=True), torch.zeros(size, dtype=torch.bool)
    responses = torch.zeros(size, dtype=torch.long)
    counts: list[dict[str, Any]] = [{}, {"num_tokens": 0, "num_responses": 0}]
    for count in counts:
        loss = aggregate(per_token, mask, responses, mode, max_tokens=8, **count)
        assert loss.item() == 0
        assert torch.autograd.grad(loss, per_token)[0].tolist() == [0] * size


def test_sum_norm_needs_its_length() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate(torch.ones(1), torch.ones(1, dtype=torch.bool), torch.zeros(1), "sequence_sum_norm")


def test_tokens_of_each_response() -> None:
    responses, mask = torch.tensor([4, 9, 4, 9, 4]), torch.tensor([True, False, True, True, False])
    assert count_tokens(mask, responses).tolist() == [2, 1, 2, 1, 2]


@settings(deadline=None)
@given(st.data())
def test_parts_add_up_however_the_batch_is_cut(data: st.DataObject) -> None:
    """Also where a cut runs through a response, as between context-parallel ranks, or leaves a part empty."""
    mode = data.draw(st.sampled_from(MODES))
    size = data.draw(st.integers(1, 30))
    per_token = torch.tensor(data.draw(st.lists(st.floats(-3, 3), min_size=size, max_size=size)), dtype=torch.float64)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    responses = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    per_token.requires_grad_()
    whole = aggregate(per_token, mask, responses, mode, max_tokens=5)
    lengths = count_tokens(mask, responses)
    parts = sum(
        aggregate(
            per_token[chosen],
            mask[chosen],
            responses[chosen],
            mode,
            max_tokens=5,
            num_tokens=mask.sum(),
            num_responses=len(set(responses[mask].tolist())),
            response_lengths=lengths[chosen],
        )
        for chosen in (part_of == part for part in range(4))
    )
    assert isinstance(parts, Tensor)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(value, per_token)[0] for value in (parts, whole)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
