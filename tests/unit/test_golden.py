"""Golden values of the objective: inputs and results computed in float64 by an independent reference."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algorithm.advantage import gae, group_advantages, reinforce_pp
from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.correction import rollout_correction
from dapo_megatron.algorithm.group_filter import mixed_groups
from dapo_megatron.algorithm.kl import KLEstimator, kl_penalty
from dapo_megatron.algorithm.log_prob import log_probs_and_entropy
from dapo_megatron.algorithm.overlong import overlong_penalty
from dapo_megatron.algorithm.policy_loss import policy_loss
from dapo_megatron.config.algorithm import AlgorithmConfig, ClipConfig, CorrectionConfig

Case = dict[str, Any]
CASES: list[Case] = json.loads((Path(__file__).parents[1] / "golden" / "golden_public.json").read_text())["cases"]

# Cases of each kind that this file holds a test for: all there are.
TESTED = {
    "advantage": 28,
    "cispo": 10,
    "group_filter": 13,
    "gspo": 8,
    "kl": 9,
    "logprob": 4,
    "overlong": 4,
    "policy_loss": 35,
    "policy_loss_rollout": 4,
    "rollout_weights": 15,
    "softmax_kl": 3,
}


def cases(kind: str) -> pytest.MarkDecorator:
    """Parametrise over the cases of a kind."""
    chosen = [case for case in CASES if case["kind"] == kind]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def assert_close(actual: Tensor, expected: Any, dtype: torch.dtype) -> None:
    """Within 1e-9 in float64, 1e-5 in float32 (absolute, or relative for values above 1)."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


def flat(rows: list[list[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(in_a_row(rows), dtype=dtype)


def in_a_row(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_every_case_of_the_file_is_accounted_for() -> None:
    assert Counter(case["kind"] for case in CASES) == TESTED
    assert len(CASES) == 133


@cases("overlong")
def test_overlong(case: Case) -> None:
    inputs = case["inputs"]
    result = overlong_penalty(inputs["lengths"], inputs["L_max"], inputs["L_cache"], inputs["factor"])
    assert result.tolist() == pytest.approx(case["expected"]["values"], abs=1e-9)


@cases("group_filter")
def test_group_filter(case: Case) -> None:
    scores = case["inputs"]["values"]
    assert mixed_groups(scores, [5] * len(scores)) == {5: case["expected"]["kept"]}


@precisions
@cases("advantage")
def test_advantage(case: Case, dtype: torch.dtype) -> None:
    """Of each response by group, of each token by `reinforce_pp` and `gae`, their whitened variants included."""
    inputs, expected, variants = case["inputs"], case["expected"], case.get("variants", {})
    rewards, lengths = torch.tensor(inputs["rewards"], dtype=dtype), torch.tensor(inputs["lens"])
    if inputs["mode"] == "reinforce_pp":
        assert_close(reinforce_pp(rewards, lengths), in_a_row(expected["adv_tokens"]), dtype)
        whitened = [[value] * n for value, n in zip(variants["whitened_over_responses"], inputs["lens"], strict=True)]
        assert_close(reinforce_pp(rewards, lengths, over="responses"), in_a_row(whitened), dtype)
    elif inputs["mode"] == "gae":
        arguments = rewards, flat(inputs["values"], dtype), lengths, inputs["gamma"], inputs["lam"]
        assert_close(gae(*arguments), in_a_row(expected["adv_tokens"]), dtype)
        assert_close(gae(*arguments, whiten=True), in_a_row(variants["whitened"]), dtype)
    else:
        estimator, population, _ = inputs["mode"].partition("_population")
        std = "population" if population else "sample"
        result = group_advantages(rewards, torch.tensor(inputs["group"]), estimator, std)
        assert_close(result, expected["adv"], dtype)
        assert [value == 0 for value in result.tolist()] == [value == 0 for value in expected["adv"]]  # zeros are exact


def check_loss(case: Case, loss: str, dtype: torch.dtype, *, weights: Tensor | float = 1.0) -> None:
    """Losses of tokens times `weights`, their aggregate and its gradient, exactly 0 where the reference's is."""
    inputs, expected = case["inputs"], case["expected"]
    log_probs = flat(inputs["log_probs"], dtype).requires_grad_()
    lengths = torch.tensor([len(row) for row in inputs["log_probs"]])
    advantages = torch.tensor(inputs["advantages"], dtype=dtype).repeat_interleave(lengths)
    responses = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask = torch.ones(len(log_probs), dtype=torch.bool)
    clip = ClipConfig(
        low=inputs["eps_low"],
        high=inputs["eps_high"],
        dual=inputs.get("dual_clip"),
        by_sign=inputs.get("clip_by_sign", False),
    )
    config = AlgorithmConfig(loss=loss, clip=clip)
    result = policy_loss(log_probs, flat(inputs["old_log_probs"], dtype), advantages, mask, responses, config)
    losses = result.losses * weights
    total = aggregate(losses, mask, responses, inputs["agg"], max_tokens=inputs["L_max"])
    (gradient,) = torch.autograd.grad(total, log_probs)
    assert_close(total, expected["loss"], dtype)
    assert_close(losses, [value for row in expected["token_loss"] for value in row], dtype)
    assert_close(gradient, [value for row in expected["grad"] for value in row], dtype)
    assert (gradient == 0).tolist() == [value == 0 for row in expected["grad"] for value in row]


@precisions
@cases("policy_loss")
def test_policy_loss(case: Case, dtype: torch.dtype) -> None:
    check_loss(case, "ppo_clip", dtype)


@precisions
@cases("gspo")
def test_gspo(case: Case, dtype: torch.dtype) -> None:
    check_loss(case, "gspo", dtype)


@precisions
@cases("cispo")
def test_cispo(case: Case, dtype: torch.dtype) -> None:
    check_loss(case, "cispo", dtype)


def rollout_weights(inputs: Case, dtype: torch.dtype) -> Tensor:
    """Weights of a case's tokens, one response after the other."""
    lengths = torch.tensor([len(row) for row in inputs["old_log_probs"]])
    responses = torch.arange(len(lengths)).repeat_interleave(lengths)
    old, rollout = (flat(inputs[name], dtype) for name in ("old_log_probs", "rollout_log_probs"))
    bounds = {"cap": inputs["C"], "low": inputs["lo"], "high": inputs["hi"]}
    config = CorrectionConfig(mode=inputs["kind"], level=inputs["level"], **bounds)
    return rollout_correction(old, rollout, torch.ones(len(old), dtype=torch.bool), responses, config).weights


@precisions
@cases("rollout_weights")
def test_rollout_weights(case: Case, dtype: torch.dtype) -> None:
    expected = [weight for row in case["expected"]["weights"] for weight in row]
    assert_close(rollout_weights(case["inputs"], dtype), expected, dtype)


@precisions
@cases("policy_loss_rollout")
def test_policy_loss_with_rollout_weights(case: Case, dtype: torch.dtype) -> None:
    check_loss(case, "ppo_clip", dtype, weights=rollout_weights(case["inputs"], dtype))


@precisions
@cases("logprob")
def test_log_probs_and_entropy(case: Case, dtype: torch.dtype) -> None:
    inputs, expected = case["inputs"], case["expected"]
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor(inputs["tokens"]), inputs["T"])
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    assert_close(log_probs, expected["logprob"], dtype)
    assert_close(entropy, expected["entropy"], dtype)
    assert_close(gradient, expected["grad_logits_of_sum_logprob"], dtype)


@precisions
@cases("kl")
def test_kl(case: Case, dtype: torch.dtype) -> None:
    inputs, expected = case["inputs"], case["expected"]
    log_probs = flat(inputs["log_probs"], dtype).requires_grad_()
    lengths = torch.tensor([len(row) for row in inputs["log_probs"]])
    responses = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask = torch.ones(len(log_probs), dtype=torch.bool)
    penalty = kl_penalty(log_probs, flat(inputs["ref_log_probs"], dtype), inputs["estimator"])
    total = inputs["coefficient"] * aggregate(penalty, mask, responses, inputs["agg"], max_tokens=inputs["L_max"])
    (gradient,) = torch.autograd.grad(total, log_probs)
    assert_close(total, expected["loss"], dtype)
    assert_close(penalty, [value for row in expected["token_kl"] for value in row], dtype)
    assert_close(gradient, [value for row in expected["grad"] for value in row], dtype)


@precisions
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@cases("softmax_kl")
def test_expected_kl(case: Case, estimator: KLEstimator, dtype: torch.dtype) -> None:
    """Over all tokens: the expected estimate, and its expected gradient where it stands in the loss."""
    inputs, expected = case["inputs"], case["expected"]
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    log_probs = logits.log_softmax(0)
    penalty = kl_penalty(log_probs, torch.tensor(inputs["ref_logits"], dtype=dtype).log_softmax(0), estimator)
    value = (log_probs.detach().exp() * penalty).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    assert_close(value, expected[f"expected_value_{estimator}"], dtype)
    assert_close(gradient, expected[f"expected_inloss_grad_{estimator}"], dtype)
