"""Laws 1 and 4 for the critic: the same numbers in every layout, and bit-equal after a resume."""

import math
from typing import Any

import pytest

from tests.distributed.launch import Launcher
from tests.models import tiny_model

WORKER = "tests.distributed.critic_worker"
TOLERANCE = 1e-5  # of ||values|| of a response, and ||g|| of a parameter
CHANGE_TOLERANCE = 2e-4  # of the change of a parameter's weights in two updates, as in test_layouts

pytestmark = pytest.mark.timeout(600)

Case = dict[str, Any]

TP2: Case = {"tensor": 2}
SP = TP2 | {"sequence": True}
PP2 = {"pipeline": 2}
VPP2 = PP2 | {"virtual_pipeline": 2}
SMALL = {"micro_batch_tokens": 72}

# Family: name -> (layout, training section). Four ranks each but for the references.
LAYOUTS: dict[str, dict[str, tuple[Case, Case]]] = {
    "qwen3": {
        "DP4 small": ({}, SMALL),
        "TP2 SP": (SP, SMALL),
        "PP2 VPP2": (VPP2, {}),
        "CP4": ({"context": 4}, {}),
        "TP2 SP PP2 VPP2": (SP | VPP2, {"recompute": "full"}),
        "PP2 CP2": (PP2 | {"context": 2}, {}),
    },
    "qwen3_moe": {
        "EP4 TP2 SP": (SP | {"expert": 4}, {}),
        "EP2 PP2 VPP2": (VPP2 | {"expert": 2}, {}),
    },
}
REFERENCE = "one rank"
RESUMED: dict[str, tuple[str, str, Case]] = {
    "TP2 SP PP2, bf16": ("qwen3", "bf16", SP | PP2),
    "PP2 VPP2": ("qwen3", "fp32", VPP2),
    "EP2, bf16": ("qwen3_moe", "bf16", {"expert": 2}),
}
NAMES = [(family, name) for family, layouts in LAYOUTS.items() for name in layouts]


@pytest.fixture(scope="module")
def outcome(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("critic")
    references: list[Case] = []
    cases: list[Case] = []
    for family, layouts in LAYOUTS.items():
        model = str(tiny_model(folder / family, family))
        common = {"model": model, "reference": str(folder / f"{family}.safetensors")}
        references.append(common | {"name": f"{family} {REFERENCE}"})
        cases += [
            common | {"name": f"{family} {name}", "parallel": layout, "training": training}
            for name, (layout, training) in layouts.items()
        ]
    cases += [
        {
            "name": name,
            "model": str(folder / family),
            "parallel": layout,
            "training": {"precision": precision},
            "dir": str(folder / f"run {i}"),
        }
        for i, (name, (family, precision, layout)) in enumerate(RESUMED.items())
    ]
    found = run_ranks(1, WORKER, {"cases": references}, folder)
    return found | run_ranks(4, WORKER, {"cases": cases}, folder, timeout=420)


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_reference_exercises_what_layouts_break(outcome: dict[str, Any], family: str) -> None:
    metrics = outcome[f"{family} {REFERENCE}"]["metrics"]
    assert 0.1 < metrics["clip"] < 0.9
    assert abs(metrics["value"]) > 0.01
    assert metrics["first_norm"] > 0.05  # the gradient is clipped
    assert math.isfinite(metrics["explained_variance"])


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_layout(outcome: dict[str, Any], family: str, name: str) -> None:
    found, expected = outcome[f"{family} {name}"], outcome[f"{family} {REFERENCE}"]
    errors = found["errors"]
    assert {"grad/head", "change/head", "grad/model.embed_tokens.weight", "values/0"} <= errors.keys()
    for tensor, error in errors.items():
        assert error <= (CHANGE_TOLERANCE if tensor.startswith("change") else TOLERANCE), tensor
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_critic_ends_bit_equal(outcome: dict[str, Any], name: str) -> None:
    assert outcome[name] == [[], [], [], []]
