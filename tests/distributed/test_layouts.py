"""Law 1: the same batch and weights give the same numbers in every layout. Law 6: r = 1 at the start.

The layouts of one number of ranks run in the same processes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.distributed.launch import Launcher
from tests.distributed.layout_worker import OBJECTIVES, ON_POLICY
from tests.models import smollm2, tiny_model

WORKER = "tests.distributed.layout_worker"
TOLERANCE = 1e-5  # of ||g||, per parameter
# Of the change of a parameter's weights in two updates, where Adam divides by small second moments.
CHANGE_TOLERANCE = 2e-4

pytestmark = pytest.mark.timeout(900)

Case = dict[str, Any]
Outcome = dict[str, Any]

DP2: Case = {}
TP2 = {"tensor": 2}
TP2_SP = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
PP2_VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
CP2 = {"context": 2}
EP2 = {"expert": 2}

SMALL = {"micro_batch_tokens": 72}  # two or three sequences, six micro-batches and more on two ranks
WHOLE = {"micro_batch_tokens": 4096}
PADDED = {"sequence_multiple": 36}  # every sequence to the same length
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}

# Name: (layout, training section). The number of ranks is the key above.
DENSE: dict[int, dict[str, tuple[Case, Case]]] = {
    1: {
        "cut small": ({}, SMALL),
        "cut whole": ({}, WHOLE | {"log_prob_chunk": 4096}),
        "padded": ({}, PADDED),
        "padded to 12": ({}, {"sequence_multiple": 12}),
        "full": ({}, FULL),
        "selective": ({}, SELECTIVE),
        "core attention": ({}, {"recompute": "selective"}),
    },
    2: {
        f"{name} {setting}".strip(): (layout, training)
        for name, layout in {
            "DP2": DP2,
            "TP2": TP2,
            "TP2 SP": TP2_SP,
            "PP2": PP2,
            "PP2 VPP2": PP2_VPP2,
            "CP2": CP2,
        }.items()
        for setting, training in {
            "": {},
            "small, full": SMALL | FULL,
            "whole, selective": WHOLE | SELECTIVE,
            "padded": PADDED,
        }.items()
    },
    4: {
        "PP4": ({"pipeline": 4}, {}),
        "CP4": ({"context": 4}, {}),
        "TP2 DP2": (TP2, SMALL),
        "TP2 PP2": (TP2 | PP2, FULL),
        "TP2 SP CP2": (TP2_SP | CP2, SELECTIVE),
        "TP2 SP PP2 VPP2": (TP2_SP | PP2_VPP2, {}),
        "PP2 CP2": (PP2 | CP2, PADDED),
        "PP2 VPP2 CP2": (PP2_VPP2 | CP2, SMALL | FULL),
        "PP2 VPP2 DP2": (PP2_VPP2, WHOLE),
        "CP2 DP2": (CP2, SMALL),
    },
}
MOE: dict[int, dict[str, tuple[Case, Case]]] = {
    1: {
        "cut small": ({}, SMALL),
        "cut whole": ({}, WHOLE),
        "padded": ({}, PADDED),
        "full": ({}, FULL),
        "recompute moe": ({}, {"recompute": "selective", "recompute_modules": ["moe", "layernorm"]}),
    },
    2: {
        "DP2": (DP2, {}),
        "CP2": (CP2, SMALL),
        "PP2 VPP2": (PP2_VPP2, {}),
        "EP2": (EP2, {}),
        "EP2 padded, full": (EP2, PADDED | FULL),
        "EP2 CP2": (EP2 | CP2, {}),
        "EP2 TP2 SP": (EP2 | TP2_SP, SMALL),
        "ETP2 TP2 SP": (TP2_SP | {"expert_tensor": 2}, {}),
        "TP2 SP": (TP2_SP, {}),  # whole experts on each tensor-parallel rank
        "ETP2": ({"expert_tensor": 2}, {}),  # experts split over data-parallel ranks
    },
    4: {
        "EP4": ({"expert": 4}, WHOLE),
        "EP2 DP2": (EP2, FULL),
        "EP2 PP2 VPP2": (EP2 | PP2_VPP2, SMALL),
        "EP2 TP2 SP CP2": (EP2 | TP2_SP | CP2, {}),
        "EP4 TP2 SP CP2": ({"expert": 4} | TP2_SP | CP2, PADDED),
        "EP2 TP2 SP PP2": (EP2 | TP2_SP | PP2, {}),
        "EP2 ETP2 TP2 SP": (EP2 | TP2_SP | {"expert_tensor": 2}, {}),
        "EP2 ETP2": (EP2 | {"expert_tensor": 2}, FULL),
    },
}
# Biases and tied embeddings; untied embeddings and a vocabulary that two ranks do not divide.
QWEN2: dict[int, dict[str, tuple[Case, Case]]] = {
    2: {"TP2 SP": (TP2_SP, {}), "PP2 VPP2": (PP2_VPP2, {}), "DP2": (DP2, {})},
    4: {"TP2 PP2": (TP2 | PP2, {})},
}
LLAMA: dict[int, dict[str, tuple[Case, Case]]] = {
    2: {"TP2": (TP2, {}), "TP2 SP": (TP2_SP, SMALL), "PP2": (PP2, {}), "CP2": (CP2, {})},
    4: {"TP2 SP CP2": (TP2_SP | CP2, {})},
}
# Latent attention; one dense layer in front of those with experts.
DEEPSEEK: dict[int, dict[str, tuple[Case, Case]]] = {
    1: {"selective": ({}, {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp", "moe"]})},
    2: {
        "TP2 SP": (TP2_SP, {}),
        "EP2 TP2 SP": (EP2 | TP2_SP, FULL),
        "PP2, 1 + 3 layers": (PP2 | {"pipeline_layers": [1, 3]}, {}),
        "CP2": (CP2, {}),
    },
    4: {"EP2 TP2 SP PP2 VPP2": (EP2 | TP2_SP | PP2_VPP2, {})},
}
MIXTRAL: dict[int, dict[str, tuple[Case, Case]]] = {2: {"EP2 TP2 SP": (EP2 | TP2_SP, {})}}
# Scaled embeddings, tied to an output that is not; norms around zero.
GEMMA: dict[int, dict[str, tuple[Case, Case]]] = {2: {"TP2 SP": (TP2_SP, SELECTIVE), "PP2": (PP2, {})}}
FAMILIES = {
    "qwen3": DENSE,
    "qwen3_moe": MOE,
    "qwen2": QWEN2,
    "llama": LLAMA,
    "deepseek_v3": DEEPSEEK,
    "mixtral": MIXTRAL,
    "gemma": GEMMA,
}
UNTIED = ("llama", "deepseek_v3", "mixtral")


def case_name(family: str, ranks: int, name: str) -> str:
    return f"{family}, {ranks} rank{'s' * (ranks > 1)}: {name}"


def reference_name(family: str) -> str:
    return case_name(family, 1, "reference")


NAMES = [
    case_name(family, ranks, name)
    for family, by_ranks in FAMILIES.items()
    for ranks, cases in by_ranks.items()
    for name in cases
]


@pytest.fixture(scope="module")
def outcome(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All layouts of the tiny models."""
    folder = tmp_path_factory.mktemp("layouts")
    cases: dict[int, list[Case]] = {1: [], 2: [], 4: []}
    for family, by_ranks in FAMILIES.items():
        untied = family in UNTIED
        common = {
            "model": str(tiny_model(folder / family, family, tied=not untied, vocab=151 if untied else 192)),
            "reference": str(folder / f"{family}.safetensors"),
        }
        cases[1].append(common | {"name": reference_name(family), "is_reference": True})
        for ranks, layouts in by_ranks.items():
            for name, (layout, training) in layouts.items():
                case = {"name": case_name(family, ranks, name), "parallel": layout, "training": training}
                cases[ranks].append(common | case)
    exported = {
        "name": EXPORT,
        "model": str(folder / "deepseek_v3"),
        "reference": str(folder / "deepseek_v3" / "model.safetensors"),
        "parallel": PP2,
        "training": {"precision": "bf16"},
        "export": True,
    }
    cases[2].append(exported)
    return run_all(run_ranks, cases, folder)


EXPORT = "export in bf16"


def run_all(run_ranks: Launcher, cases: dict[int, list[Case]], folder: Path) -> Outcome:
    found: Outcome = {}
    for ranks, layouts in sorted(cases.items()):
        found |= run_ranks(ranks, WORKER, {"cases": layouts}, folder, timeout=420)
    return found


def check(outcome: Outcome, name: str, reference: str) -> None:
    found, expected = outcome[name], outcome[reference]
    assert found["worst"].keys() == expected["worst"].keys()
    for kind, (error, tensor) in found["worst"].items():
        limit = CHANGE_TOLERANCE if kind == "change" else TOLERANCE
        assert error <= limit, f"{name}: {tensor} differs by {error:.1e}"
    for objective, metrics in expected["metrics"].items():
        for metric, value in metrics.items():
            tolerance = pytest.approx(value, rel=1e-5, abs=1e-7)
            assert found["metrics"][objective][metric] == tolerance, f"{name}: {objective} {metric}"
    if ON_POLICY in found["metrics"]:
        at_start = found["metrics"][ON_POLICY]
        assert (at_start["log_ratio_abs"], at_start["clip_high"], at_start["clip_low"]) == (0.0, 0.0, 0.0)


def test_there_are_enough_layouts() -> None:
    assert len(NAMES) >= 60


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_exercises_what_layouts_break(outcome: Outcome, family: str) -> None:
    """Ratios are clipped on both sides where the old policy differs, and objectives and updates differ."""
    metrics = outcome[reference_name(family)]["metrics"]
    for objective in OBJECTIVES.keys() - {ON_POLICY}:
        assert metrics[objective]["clip_high"] > 0
        assert metrics[objective]["clip_low"] > 0
    assert 0 < metrics["gspo"]["rollout_masked"] < 1
    assert metrics["sequence_mean"]["kl"] > 0.01
    assert len({metrics[objective]["loss"] for objective in OBJECTIVES}) == len(OBJECTIVES)
    assert metrics["updates"]["first"] > 0.05  # the gradient is clipped
    assert metrics["updates"]["first"] != metrics["updates"]["second"]


@pytest.mark.parametrize("name", NAMES)
def test_layout(outcome: Outcome, name: str) -> None:
    check(outcome, name, reference_name(name.partition(",")[0]))


def test_export_keeps_fp32_what_the_model_keeps_fp32(outcome: Outcome) -> None:
    """Stages send each other tensors of two precisions."""
    errors = {name: error for name, (error, _) in outcome[EXPORT]["worst"].items()}
    biases = {name for name in errors if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    assert {errors[name] for name in biases} == {0.0}
    assert 0 < max(errors.values()) < 2**-8


def first_layers(model: Path, layers: int, folder: Path) -> Path:
    """A Llama model that ends after so many layers, in a new folder."""
    config = json.loads((model / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    left_out = tuple(f"model.layers.{layer}." for layer in range(layers, config["num_hidden_layers"]))
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_smollm2(run_ranks: Launcher, tmp_path: Path) -> None:
    """A real model, with 9 heads and 3 KV heads; in fp64, because its activations reach 23,000: from layer 12 on."""
    common = {
        "model": str(first_layers(smollm2(), 12, tmp_path / "model")),
        "reference": str(tmp_path / "reference.safetensors"),
        "training": {"log_prob_chunk": 64},
        "prompts": 2,
        "arithmetic": "fp64",
        "objectives": ["token_mean"],
    }
    cases = {
        1: [common | {"name": "reference", "is_reference": True}],
        2: [common | {"name": "CP2", "parallel": CP2}],
        3: [common | {"name": "TP3", "parallel": {"tensor": 3}}],
    }
    outcome = run_all(run_ranks, cases, tmp_path)
    for name in ("CP2", "TP3"):
        check(outcome, name, "reference")
