"""Law 4 in layouts whose state is spread in other ways than by tensor and data: resumed, a run ends bit-equal."""

from typing import Any

import pytest

from tests.distributed.launch import torchrun
from tests.models import tiny_model

pytestmark = pytest.mark.timeout(300)

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DP2, bf16": ("qwen3", "bf16", {}),
    "TP2 SP, fp16": ("qwen3", "fp16", {"tensor": 2, "sequence": True}),
    "PP2 VPP2": ("qwen3", "fp32", {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": ("qwen3", "fp32", {"context": 2}),
    "EP2, bf16": ("qwen3_moe", "bf16", {"expert": 2}),
    "EP2 TP2 SP": ("qwen3_moe", "fp32", {"expert": 2, "tensor": 2, "sequence": True}),
    "TP2 SP": ("qwen3_moe", "fp32", {"tensor": 2, "sequence": True}),
    "ETP2": ("qwen3_moe", "fp32", {"expert_tensor": 2}),
    "PP2 VPP2 with experts": ("qwen3_moe", "fp32", {"pipeline": 2, "virtual_pipeline": 2}),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    folder = tmp_path_factory.mktemp("resume")
    models = {family: str(tiny_model(folder / family, family)) for family in ("qwen3", "qwen3_moe")}
    cases = [
        {
            "name": name,
            "model": models[family],
            "precision": precision,
            "parallel": layout,
            "dir": str(folder / f"run {i}"),
        }
        for i, (name, (family, precision, layout)) in enumerate(CASES.items())
    ]
    return torchrun(2, "tests.distributed.resume_worker", {"cases": cases}, folder)


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_ends_bit_equal(outcome: dict[str, list[list[str]]], name: str) -> None:
    assert outcome[name] == [[], []]
