"""Golden values of the objective: inputs and results computed in float64 by an independent reference."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.group_filter import mixed_groups
from dapo_megatron.algorithm.log_prob import log_probs_and_entropy
from dapo_megatron.algorithm.overlong import overlong_penalty
from dapo_megatron.algorithm.policy_loss import policy_loss
from dapo_megatron.config.algorithm import AlgorithmConfig, ClipConfig

Case = dict[str, Any]
CASES: list[Case] = json.loads((Path(__file__).parents[1] / "golden" / "golden_public.json").read_text())["cases"]

# What the file also holds: options of the objective that do not exist yet, by how many cases.
MISSING = {
    "advantage group_mean": 3,
    "advantage group_norm_population": 3,
    "advantage gae": 3,
    "advantage leave_one_out": 4,
    "advantage min_max": 3,
    "advantage reinforce_pp": 3,
    "cispo": 10,
    "kl": 9,
    "policy_loss clip_by_sign": 1,
    "policy_loss_rollout": 4,
    "rollout_weights": 15,
    "softmax_kl": 3,
}
TESTED = {"advantage": 9, "group_filter": 13, "gspo": 8, "logprob": 4, "overlong": 4, "policy_loss": 34}


def missing_option(case: Case) -> str | None:
    """Name of the missing option a case is about; None where the case is tested."""
    kind, inputs = case["kind"], case["inputs"]
    if kind == "advantage":
        return None if inputs["mode"] == "group_norm" else f"advantage {inputs['mode']}"
    if inputs.get("clip_by_sign"):
        return f"{kind} clip_by_sign"
    return None if kind in TESTED else kind


def cases(kind: str) -> pytest.MarkDecorator:
    """Parametrise over the tested cases of a kind."""
    chosen = [case for case in CASES if case["kind"] == kind and missing_option(case) is None]
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
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def test_every_case_of_the_file_is_accounted_for() -> None:
    tested = Counter(case["kind"] for case in CASES if missing_option(case) is None)
    assert Counter(filter(None, map(missing_option, CASES))) == MISSING
    assert tested == TESTED
    assert (len(CASES), tested.total()) == (133, 72)


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
    inputs, expected = case["inputs"], case["expected"]["adv"]
    result = group_advantages(torch.tensor(inputs["rewards"], dtype=dtype), torch.tensor(inputs["group"]))
    assert_close(result, expected, dtype)
    assert [value == 0 for value in result.tolist()] == [value == 0 for value in expected]  # zeros are exact


def check_loss(case: Case, loss: str, dtype: torch.dtype) -> None:
    """Losses of tokens, their aggregate and its gradient, which is exactly 0 where the reference's is."""
    inputs, expected = case["inputs"], case["expected"]
    log_probs = flat(inputs["log_probs"], dtype).requires_grad_()
    lengths = torch.tensor([len(row) for row in inputs["log_probs"]])
    advantages = torch.tensor(inputs["advantages"], dtype=dtype).repeat_interleave(lengths)
    responses = torch.arange(len(lengths)).repeat_interleave(lengths)
    mask = torch.ones(len(log_probs), dtype=torch.bool)
    clip = ClipConfig(low=inputs["eps_low"], high=inputs["eps_high"], dual=inputs.get("dual_clip"))
    config = AlgorithmConfig(loss=loss, clip=clip)
    result = policy_loss(log_probs, flat(inputs["old_log_probs"], dtype), advantages, mask, responses, config)
    total = aggregate(result.losses, mask, responses, inputs["agg"], max_tokens=inputs["L_max"])
    (gradient,) = torch.autograd.grad(total, log_probs)
    assert_close(total, expected["loss"], dtype)
    assert_close(result.losses, [value for row in expected["token_loss"] for value in row], dtype)
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
@cases("logprob")
def test_log_probs_and_entropy(case: Case, dtype: torch.dtype) -> None:
    inputs, expected = case["inputs"], case["expected"]
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor(inputs["tokens"]), inputs["T"])
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    assert_close(log_probs, expected["logprob"], dtype)
    assert_close(entropy, expected["entropy"], dtype)
    assert_close(gradient, expected["grad_logits_of_sum_logprob"], dtype)
