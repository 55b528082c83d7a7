"""Law 1: the same batch and weights give the same loss and gradients in every layout. Law 6: r = 1 at the start."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import torchrun
from tests.models import smollm2, tiny_model

WORKER = "tests.distributed.layout_worker"
TOLERANCE = 1e-5  # of ||g||, per parameter

pytestmark = pytest.mark.timeout(600)

Outcome = dict[str, dict[str, Any]]


def run(model: Path, folder: Path, cases: dict[int, list[dict[str, Any]]]) -> Outcome:
    """All cases of one model, one torchrun per number of ranks, the reference (1 rank) first."""
    job: dict[str, Any] = {"model": str(model), "reference": str(folder / "reference.safetensors")}
    outcome: Outcome = {}
    for ranks, layouts in sorted(cases.items()):
        outcome |= torchrun(ranks, WORKER, job | {"cases": layouts}, folder)
    return outcome


REFERENCE = {"name": "1 rank", "is_reference": True}
TINY_CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        REFERENCE,
        {"name": "one response per micro-batch", "training": {"micro_batch_tokens": 36}},
        {"name": "one micro-batch", "training": {"micro_batch_tokens": 4096, "log_prob_chunk": 4096}},
    ],
    2: [
        {"name": "DP2"},
        {"name": "TP2", "parallel": {"tensor": 2}},
        {"name": "PP2", "parallel": {"pipeline": 2}},
    ],
    4: [
        {"name": "TP2 PP2", "parallel": {"tensor": 2, "pipeline": 2}},
        {"name": "TP2 DP2", "parallel": {"tensor": 2}},
        {"name": "DP4", "training": {"micro_batch_tokens": 512}},
    ],
}


def check(outcome: Outcome, name: str) -> None:
    case, reference = outcome[name], outcome[REFERENCE["name"]]
    assert case["error"] <= TOLERANCE, f"{name}: {case['worst']} differs by {case['error']:.1e}"
    for metric in ("loss", "entropy", "clip_high", "clip_low", "ratio_max"):
        assert case["metrics"][metric] == pytest.approx(reference["metrics"][metric], rel=1e-5, abs=1e-7), metric
    assert case["metrics"]["clip_high"] > 0  # the batch does exercise clipping
    assert case["metrics"]["on_policy_log_ratio"] == 0.0
    assert case["metrics"]["on_policy_clipped"] == 0.0


@pytest.fixture(scope="module")
def qwen2_tied(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("qwen2")
    return run(tiny_model(folder / "model", "qwen2", tied=True), folder, TINY_CASES)


@pytest.mark.parametrize("name", [case["name"] for cases in TINY_CASES.values() for case in cases])
def test_qwen2_with_tied_embeddings(qwen2_tied: Outcome, name: str) -> None:
    check(qwen2_tied, name)


def test_llama_untied_with_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    layouts = {"TP2": {"tensor": 2}, "PP2": {"pipeline": 2}}
    cases = {1: [REFERENCE], 2: [{"name": name, "parallel": parallel} for name, parallel in layouts.items()]}
    outcome = run(tiny_model(tmp_path / "model", "llama", tied=False, vocab=151), tmp_path, cases)
    for name in outcome:
        check(outcome, name)


def test_smollm2(tmp_path: Path) -> None:
    """The real model: 9 heads and 3 KV heads, DP2 on two ranks, TP3 on three."""
    common = {"training": {"log_prob_chunk": 64}, "arithmetic": "fp64"}
    cases = {
        1: [REFERENCE | common],
        2: [{"name": "DP2"} | common],
        3: [{"name": "TP3", "parallel": {"tensor": 3}} | common],
    }
    outcome = run(smollm2(), tmp_path, cases)
    for name in ("DP2", "TP3"):
        check(outcome, name)
