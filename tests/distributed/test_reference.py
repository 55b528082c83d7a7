"""A reference policy in a layout of its own gives the same log-probs, and the policy does not notice it."""

from typing import Any

import pytest

from tests.distributed.launch import Launcher
from tests.models import tiny_model

WORKER = "tests.distributed.reference_worker"
TOLERANCE = 1e-6  # of ||log-probs||, per response

pytestmark = pytest.mark.timeout(600)

TP2 = {"tensor": 2}
TP2_SP = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
PP2_VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
CP2 = {"context": 2}

# Family of the model, layout of the policy, layout of the reference: both on four ranks. None: the policy's.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "DP4, the policy's": ("qwen2", {}, None),
    "TP2 DP2, PP2 TP2": ("qwen2", TP2, TP2 | PP2),
    "PP2 DP2, CP4": ("qwen2", PP2, {"context": 4}),
    "PP2 VPP2 DP2, TP2 SP": ("qwen2", PP2_VPP2, TP2_SP),
    "CP2 DP2, PP2 VPP2": ("qwen2", CP2, PP2_VPP2),
    "experts: EP2 DP2, TP2 SP EP4": ("qwen3_moe", {"expert": 2}, TP2_SP | {"expert": 4}),
}


@pytest.fixture(scope="module")
def outcome(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All pairs, after those of one rank, whose log-probs count as right."""
    folder = tmp_path_factory.mktemp("references")
    families = {family for family, _, _ in CASES.values()}
    common = {
        family: {
            "model": str(tiny_model(folder / family, family)),
            "reference_model": str(tiny_model(folder / f"{family}-reference", family, seed=1)),
            "stored": str(folder / f"{family}.safetensors"),
        }
        for family in families
    }
    single = [
        common[family] | {"name": f"{family} on one rank", "policy": {}, "reference": None, "is_reference": True}
        for family in families
    ]
    pairs = [
        common[family] | {"name": name, "policy": policy, "reference": reference}
        for name, (family, policy, reference) in CASES.items()
    ]
    return run_ranks(1, WORKER, {"cases": single}, folder) | run_ranks(4, WORKER, {"cases": pairs}, folder, timeout=420)


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_one_rank(outcome: dict[str, Any], name: str) -> None:
    assert outcome[name]["error"] <= TOLERANCE
    assert outcome[name]["misplaced"] == 0  # in the shapes of the policy's micro-batches, on its last stage alone
    assert outcome[name]["changed"] == 0  # bit for bit the same after updates of the policy


@pytest.mark.parametrize("name", CASES)
def test_the_policy_does_not_notice(outcome: dict[str, Any], name: str) -> None:
    """Gradients and weights of two updates, bit for bit, against a policy beside which no reference was built."""
    assert outcome[name]["trace"] == 0
