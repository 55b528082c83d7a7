"""Another project's conversion puts the same numbers into the same places, and takes them out again."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import Launcher
from tests.models import tiny_model

pytest.importorskip("mbridge", reason="mbridge, the conversion to compare with, is not installed")
pytestmark = pytest.mark.timeout(300)

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
}
MODELS = {"qwen2": True, "llama": False}  # tied or not; mbridge pads no vocabulary unless told to: 192 is even
CASES = [f"{family} {layout}" for family in MODELS for layout in LAYOUTS]


@pytest.fixture(scope="module")
def outcome(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("mbridge")
    cases = []
    for family, tied in MODELS.items():
        model = str(tiny_model(folder / family, family, tied=tied, vocab=192))
        cases += [{"name": f"{family} {n}", "model": model, "parallel": layout} for n, layout in LAYOUTS.items()]
    return run_ranks(2, "tests.distributed.mbridge_worker", {"cases": cases}, folder)


@pytest.mark.parametrize("case", CASES)
def test_mbridge_agrees(outcome: dict[str, Any], case: str) -> None:
    assert outcome[case]["loaded"] == []
    assert outcome[case]["exported"] == []
    assert all(int(count) > 10 for count in outcome[case]["parameters"])
