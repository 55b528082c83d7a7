"""Law 1 with routes that were given (R3) or recorded (R2): every layout sends the same tokens to the same experts.

Random routes, so that a token or layer that is mixed up with another one changes everything.
"""

from typing import Any

import pytest

from tests.distributed.launch import Launcher
from tests.distributed.test_layouts import (
    CP2,
    EP2,
    FULL,
    PADDED,
    PP2,
    PP2_VPP2,
    SMALL,
    TP2_SP,
    Case,
    Outcome,
    check,
    run_all,
)
from tests.models import tiny_model

pytestmark = pytest.mark.timeout(600)

EXPERTS = {"recompute": "selective", "recompute_modules": ["moe", "layernorm"]}
LAYOUTS: dict[str, dict[str, tuple[Case, Case]]] = {
    "qwen3_moe R3": {
        "PP4": ({"pipeline": 4}, SMALL | FULL),
        "PP2 VPP2 EP2": (PP2_VPP2 | EP2, SMALL | EXPERTS),
        "EP2 TP2 SP CP2": (EP2 | TP2_SP | CP2, {}),
        "EP2 ETP2 TP2 SP": (EP2 | TP2_SP | {"expert_tensor": 2}, FULL),
    },
    "deepseek_v3 R3": {
        "EP2 TP2 SP PP2 VPP2": (EP2 | TP2_SP | PP2_VPP2, SMALL | FULL),
        "CP2 PP2, 1 + 3 layers": (CP2 | PP2 | {"pipeline_layers": [1, 3]}, {}),
    },
    "qwen3_moe R2": {
        "PP2 VPP2 EP2": (PP2_VPP2 | EP2, SMALL | FULL),
        "EP2 TP2 SP CP2": (EP2 | TP2_SP | CP2, PADDED | EXPERTS),
    },
}
OFF = "qwen3_moe off"
REFERENCES = [*LAYOUTS, OFF]


@pytest.fixture(scope="module")
def outcome(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """On a single rank and on four."""
    folder = tmp_path_factory.mktemp("router_replay")
    models = {f: str(tiny_model(folder / f, f, tied=f == "qwen3_moe")) for f in ("qwen3_moe", "deepseek_v3")}
    cases: dict[int, list[Case]] = {1: [], 4: []}
    for name in REFERENCES:
        family, replayed = name.split()
        common: dict[str, Any] = {
            "model": models[family],
            "reference": str(folder / f"{name}.safetensors"),
            "objectives": ["token_mean"],
        }
        case = {"name": name, "is_reference": True, "training": {"router_replay": replayed}}
        cases[1].append(common | case)
        for layout, (parallel, training) in LAYOUTS.get(name, {}).items():
            case = {"name": f"{name}, {layout}", "parallel": parallel}
            cases[4].append(common | case | {"training": training | {"router_replay": replayed}})
    return run_all(run_ranks, cases, folder)


@pytest.mark.parametrize("name", [f"{group}, {layout}" for group, layouts in LAYOUTS.items() for layout in layouts])
def test_layout(outcome: Outcome, name: str) -> None:
    check(outcome, name, name.partition(",")[0])


def test_given_routes_are_not_the_routers_own(outcome: Outcome) -> None:
    for name in ("qwen3_moe R3", "deepseek_v3 R3"):
        assert 0.5 < outcome[name]["metrics"]["token_mean"]["router_mismatch"] < 1


def test_recorded_routes_hold_when_the_weights_have_moved(outcome: Outcome) -> None:
    """The first update has the routers' own, the second would have others."""
    recorded, off = outcome["qwen3_moe R2"]["metrics"], outcome[OFF]["metrics"]
    assert recorded["token_mean"] == off["token_mean"] | {"router_mismatch": 0.0}
    assert recorded["updates"]["first"] == off["updates"]["first"]
    assert recorded["updates"]["second"] != off["updates"]["second"]
