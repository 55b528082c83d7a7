"""Paths to keep and prompts of a quantisation, without a model."""

from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.checkpoint.quantize import QuantizeOptions, read_prompts, split_prompts
from dapo_megatron.checkpoint.quantize_plan import check_ignored, matches
from dapo_megatron.errors import UserError


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate", False),
        ("model.layers.1.**", "model.layers.1.mlp.gate", True),
        ("model.layers.1.**", "model.layers.10.mlp.gate", False),
        ("model.layers.*.mlp.gate", "model.layers.10.mlp.gate", True),
        ("model.layers.*", "model.layers.1.mlp", False),
        ("**.gate", "model.layers.1.mlp.gate", True),
        ("**.gate", "model.layers.1.mlp.investigate", False),
        ("model.layers.1*.mlp.gate", "model.layers.10.mlp.gate", False),
        ("modelXlayers", "model.layers", False),
        ("model.layers", "modelXlayers", False),
    ],
)
def test_patterns_match_whole_components(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@pytest.mark.parametrize(
    ("quantized", "ignored"),
    [
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate"),
        ("model.layers.10.mlp.down_proj", "model.layers.1"),
        ("model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.1.up_proj"),
    ],
)
def test_paths_that_vllm_would_mix_up(quantized: str, ignored: str) -> None:
    check_ignored([quantized], ["lm_head", "model.layers.0.self_attn.o_proj"])
    with pytest.raises(UserError, match="keep both or neither"):
        check_ignored([quantized], ["lm_head", ignored])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\ntwo\n", ["one", "two"]),
        ("a.jsonl", '{"prompt": "one"}\n', ["one"]),
        ("b.jsonl", '{"text": "one", "n": 1}\n', ["one"]),
        ("c.jsonl", '{"messages": [{"role": "user", "content": "one"}]}\n', [({"role": "user", "content": "one"},)]),
    ],
)
def test_prompts_of_files(name: str, content: str, expected: list[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(tmp_path / name) == expected


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_files_without_prompts(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match=r"a\.txt has no prompts"):
        read_prompts(tmp_path / "a.txt")


def test_prompts_to_compare_are_not_those_to_calibrate_with() -> None:
    options = QuantizeOptions(
        Path(), Path(), "fp8", Path("p.txt"), calibration_prompts=6, max_prompt_tokens=3, probe_tokens=4
    )
    probe, calibration = split_prompts([[i, 0, 0, i] for i in range(20)] * 2 + [[1]], options)
    assert probe == [[0, 0, 0], [5, 0, 0]]
    assert calibration == [[i, 0, 0] for i in (1, 2, 3, 4, 6, 7)]
    with pytest.raises(UserError, match=r"p\.txt has 1 different prompts of two tokens or more"):
        split_prompts([[1, 2, 3, 4], [1, 2, 3, 5], [7]], options)
