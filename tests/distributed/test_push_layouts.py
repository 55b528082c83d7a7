"""Every layout of the trainer gives servers of every layout the tensors of the checkpoint, byte for byte."""

from typing import Any

import pytest

from tests.distributed.launch import Launcher
from tests.models import tiny_model

pytestmark = pytest.mark.timeout(640)

VOCABULARY = 193  # no layout divides it
# Name: (family, tied embeddings, trainer, server, dtype).
CASES: dict[str, tuple[str, bool, dict[str, Any], dict[str, Any], str]] = {
    "TP2 PP2 -> TP2": ("llama", True, {"tensor": 2, "pipeline": 2}, {"tensor": 2}, "float32"),
    "TP4 -> PP2, tied": ("gemma", True, {"tensor": 2}, {"pipeline": 2}, "bfloat16"),
    "PP2 VPP2 -> TP4": (
        "qwen2",
        False,
        {"pipeline": 2, "virtual_pipeline": 2},
        {"tensor": 4},  # two key/value heads for four workers
        "bfloat16",
    ),
    "uneven PP2 -> one worker": ("qwen3", False, {"pipeline": 2, "pipeline_layers": [3, 1]}, {}, "float32"),
    "EP2 ETP2 -> EP2": (
        "qwen3_moe",
        True,
        {"expert": 2, "expert_tensor": 2},
        {"tensor": 2, "expert_parallel": True},
        "float32",
    ),
    "TP2 PP2 EP2 -> TP2 PP2": (
        "deepseek_v3",
        False,
        {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
        {"tensor": 2, "pipeline": 2},
        "bfloat16",
    ),
}

# The same with each rank feeding the worker on its own GPU: two servers of two workers for four ranks.
SAME_HOST = ("PP2 VPP2 -> TP4", "TP2 PP2 EP2 -> TP2 PP2", "EP2 ETP2 -> EP2")


@pytest.fixture(scope="module")
def found(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("push")
    cases: list[dict[str, Any]] = []
    for name, (family, tied, parallel, server, dtype) in CASES.items():
        model = folder / f"{family}-{tied}"
        if not model.exists():
            tiny_model(model, family, tied=tied, vocab=VOCABULARY)
        cases.append({"name": name, "model": str(model), "parallel": parallel, "server": server, "dtype": dtype})
    for case in [case for case in cases if case["name"] in SAME_HOST]:
        server = {key: 2 if key == "tensor" else value for key, value in case["server"].items() if key != "pipeline"}
        cases.append(case | {"name": f"{case['name']}, same host", "server": server, "same_host": True})
    job = {"cases": cases, "faults": cases[0]}
    return run_ranks(4, "tests.distributed.push_worker", job, folder, timeout=600)


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_arrives(case: str, found: dict[str, Any]) -> None:
    _, _, parallel, server, _ = CASES[case]
    report = found[case]
    experts = parallel.get("expert", 1)
    assert len(report["senders"]) == parallel.get("pipeline", 1) * experts
    if not server:
        assert report["groups"] == len(report["senders"])


@pytest.mark.parametrize("case", SAME_HOST)
def test_every_rank_feeds_its_own_worker(case: str, found: dict[str, Any]) -> None:
    assert found[f"{case}, same host"]["senders"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("fault", "text"), [("dies", "update_weights failed"), ("refuses", "refused pushed weights"),
                                             ("freezes", "did not answer before the deadline")])  # fmt: skip
def test_all_ranks_learn_which_server_failed(fault: str, text: str, found: dict[str, Any]) -> None:
    error = found["faults"][fault]
    assert error["same"]
    assert error["blamed"]
    assert text in error["text"]
