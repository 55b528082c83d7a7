"""Law 4 in layouts whose state is spread in other ways than by tensor and data: resumed, a run ends bit-equal.

Resumed in another layout, it starts bit-equal.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dapo_megatron.checkpoint.megatron import MegatronCheckpoint
from dapo_megatron.run_state.store import state_path
from tests.distributed.launch import Launcher
from tests.distributed.resume_worker import EXPECTED, everything, start
from tests.models import tiny_model

pytestmark = pytest.mark.timeout(300)

# Of ||change of a weight||, in the step after a move. Rounding of gradients, which Adam divides by their size.
CHANGE_TOLERANCE = 2e-4

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
    "PP2, one stage without experts": ("deepseek_v3", "bf16", {"pipeline": 2, "pipeline_layers": [1, 3]}),
}

VPP: dict[str, Any] = {"pipeline": 2, "virtual_pipeline": 2}
UNEVEN: dict[str, Any] = {"pipeline": 2, "pipeline_layers": [1, 3]}
TP_SP: dict[str, Any] = {"tensor": 2, "sequence": True}
# Model, precision, whether it has a critic, the layout in which the run is saved, and those in which it is resumed.
MOVES: dict[str, tuple[str, str, bool, dict[str, Any], dict[str, dict[str, Any]]]] = {
    # Tied embeddings of 151 rows, in the saved layout 152: padding goes, and the last stage gets a copy.
    "padded TP2": ("qwen3", "fp32", False, {"tensor": 2}, {"uneven PP2": UNEVEN, "PP2 VPP2": VPP}),
    "uneven PP2": ("qwen3", "bf16", False, UNEVEN, {"padded TP2 SP": TP_SP, "DP2": {}}),
    "DP2 EP2": ("qwen3_moe", "fp32", False, {"expert": 2},
                {"ETP2": {"expert_tensor": 2}, "TP2 SP EP2": TP_SP | {"expert": 2}, "PP2 VPP2": VPP}),
    "a stage without experts": ("deepseek_v3", "fp32", False, UNEVEN, {"TP2 SP EP2": TP_SP | {"expert": 2}}),
    "PP2 with a critic": ("qwen3", "fp32", True, {"pipeline": 2}, {"TP2 SP": TP_SP}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def moves(folder: Path) -> list[dict[str, Any]]:
    """The job's part of MOVES."""
    return [
        {
            "name": f"from {name}",
            "model": str(folder / family),
            "precision": precision,
            "critic": critic,
            "eps": 1e-3,
            "parallel": layout,
            "to": others,
            "dir": str(folder / f"moved run {i}"),
        }
        for i, (name, (family, precision, critic, layout, others)) in enumerate(MOVES.items())
    ]


@pytest.fixture(scope="module")
def outcome(run_ranks: Launcher, folder: Path, moves: list[dict[str, Any]]) -> dict[str, Any]:
    models = {
        family: str(tiny_model(folder / family, family, vocab=151)) for family in ("qwen3", "qwen3_moe", "deepseek_v3")
    }
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
    return run_ranks(2, "tests.distributed.resume_worker", {"cases": cases, "moves": moves}, folder)


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_ends_bit_equal(outcome: dict[str, Any], name: str) -> None:
    assert outcome[name] == [[], []]


@pytest.mark.parametrize(("name", "other"), [(name, other) for name, move in MOVES.items() for other in move[4]])
def test_run_resumed_in_another_layout(outcome: dict[str, Any], name: str, other: str) -> None:
    """Every weight, master weight and moment bit by bit, the step, and the next step as it would have been."""
    found = outcome[f"from {name}"][other]
    assert found["differing"] == []
    if MOVES[name][1] == "fp32":
        assert found["change"] < CHANGE_TOLERANCE


@pytest.mark.usefixtures("outcome")
@pytest.mark.parametrize("number", range(len(MOVES)), ids=[f"from {name}" for name in MOVES])
def test_run_resumed_on_another_number_of_ranks(moves: list[dict[str, Any]], number: int) -> None:
    """On one, in this process: there are fewer random states than were saved."""
    try:
        found = everything(*start(moves[number], {}))
    finally:
        dist.destroy_process_group()
    expected = torch.load(Path(moves[number]["dir"]) / EXPECTED)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.usefixtures("outcome")
@pytest.mark.parametrize("number", range(len(MOVES)), ids=[f"from {name}" for name in MOVES])
def test_states_of_the_optimizer_lie_under_the_names_of_the_weights(moves: list[dict[str, Any]], number: int) -> None:
    """Dense and expert parameters alike, which have optimizers of their own."""
    checkpoint = MegatronCheckpoint(state_path(moves[number]["dir"], 2))
    assert checkpoint.prefixes == ["", *(f"optimizer.state.{kind}." for kind in ("exp_avg", "exp_avg_sq", "param"))]
    assert all(
        checkpoint.has(row, prefix) for row in checkpoint.rows for prefix in checkpoint.prefixes if not row.is_buffer
    )
