"""Layouts that a model cannot have are refused with the keys, the rule and what would be allowed."""

from dataclasses import replace
from typing import Any

import pytest
from config_helpers import LLAMA, QWEN3_MOE

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.families import llama, qwen3_moe
from dapo_megatron.models.layout import check_layout, check_ranks

DENSE = llama.architecture(LLAMA)  # 9 heads, 3 KV heads, 6 layers, MLP 96
EXPERTS = qwen3_moe.architecture(QWEN3_MOE)  # 8 heads, 4 KV heads, 4 layers, 8 experts with MLP 48


def parallel(**sizes: Any) -> ParallelConfig:
    return ParallelConfig.model_validate(sizes)


DENSE_RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor": 2},
        "parallel.tensor=2 does not divide 9 attention heads and 3 key/value heads of Tiny; use 1 or 3",
    ),
    ({"tensor": 9}, "use 1 or 3"),
    ({"pipeline": 4}, "parallel.pipeline=4 does not divide 6 layers of Tiny; use 1, 2, 3 or 6"),
    ({"sequence": True}, "parallel.sequence=true needs parallel.tensor > 1"),
    ({"virtual_pipeline": 2}, "parallel.virtual_pipeline=2 needs parallel.pipeline > 1"),
    (
        {"pipeline": 2, "virtual_pipeline": 2},
        "parallel.virtual_pipeline=2 does not divide the 3 layers of each of the 2 pipeline stages of Tiny; use 1 or 3",
    ),
    (
        {"context": 2, "context_comm": "a2a"},
        "parallel.context=2 does not divide 9 attention heads and 3 key/value heads of Tiny at parallel.tensor=1; "
        "use parallel.context=1 or 3, or parallel.context_comm=p2p or all_gather",
    ),
    ({"tensor": 3, "context": 3, "context_comm": "a2a"}, "use parallel.context=1, or parallel.context_comm=p2p or"),
    ({"expert": 2}, "parallel.expert=2 needs a model with experts; Tiny has none: use 1"),
    ({"expert_tensor": 2}, "parallel.expert_tensor=2 needs a model with experts; Tiny has none: use 1"),
]

EXPERT_RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor": 8, "sequence": True},
        "parallel.tensor=8 does not divide 8 attention heads and 4 key/value heads of Tiny; use 1, 2 or 4",
    ),
    ({"expert": 3}, "parallel.expert=3 does not divide 8 experts of Tiny; use 1, 2, 4 or 8"),
    (
        {"expert": 2, "expert_tensor": 5},
        "parallel.expert_tensor=5 does not divide the MLP size 48 of each expert of Tiny; use 1, 2, 3, 4, 6",
    ),
    (
        {"tensor": 2, "expert_tensor": 2},
        "parallel.tensor=2 with the experts of Tiny needs parallel.sequence=true",
    ),
]


@pytest.mark.parametrize(("sizes", "message"), DENSE_RULES)
def test_layouts_a_dense_model_cannot_have(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_layout(DENSE, parallel(**sizes), "Tiny")
    assert message in str(caught.value)


@pytest.mark.parametrize(("sizes", "message"), EXPERT_RULES)
def test_layouts_a_model_with_experts_cannot_have(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_layout(EXPERTS, parallel(**sizes), "Tiny")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ffn_size": 98, "shared_ffn_size": 36}, "the MLP size 98 of Tiny; use 1 or 2"),
        ({"ffn_size": 96, "shared_ffn_size": 38}, "the MLP size 38 of the shared experts of Tiny; use 1 or 2"),
    ],
)
def test_each_kind_of_mlp_sets_its_rule(sizes: dict[str, int], message: str) -> None:
    arch, layout = replace(EXPERTS, dense_layers=1, **sizes), parallel(tensor=4, sequence=True)
    with pytest.raises(UserError) as caught:
        check_layout(arch, layout, "Tiny")
    assert f"parallel.tensor=4 does not divide {message}" in str(caught.value)
    check_layout(replace(arch, ffn_size=96, shared_ffn_size=36), layout, "Tiny")


def test_tensor_parallel_size_must_divide_the_mlp() -> None:
    odd = llama.architecture(LLAMA | {"intermediate_size": 97})
    with pytest.raises(UserError, match=r"parallel\.tensor=3 does not divide the MLP size 97 of Tiny; use 1"):
        check_layout(odd, parallel(tensor=3), "Tiny")


def test_unused_dense_mlp_of_a_model_with_experts_sets_no_rule() -> None:
    odd = qwen3_moe.architecture(QWEN3_MOE | {"intermediate_size": 97})
    check_layout(odd, parallel(tensor=2, sequence=True, expert=2), "Tiny")


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 3},
        {"tensor": 3, "sequence": True},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 3},
        {"tensor": 3, "pipeline": 6},
        {"context": 2},
        {"context": 2, "context_comm": "all_gather"},
        {"context": 3, "context_comm": "a2a"},
        {"tensor": 3, "context": 1, "context_comm": "a2a"},
    ],
)
def test_layouts_a_dense_model_can_have(sizes: dict[str, Any]) -> None:
    check_layout(DENSE, parallel(**sizes), "Tiny")


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"expert": 8},
        {"expert": 2, "expert_tensor": 3},
        {"tensor": 2, "sequence": True, "expert": 2},
        {"tensor": 2, "sequence": True, "expert_tensor": 2},
        {"tensor": 2, "sequence": True, "context": 2, "context_comm": "a2a", "expert": 4},
        {"pipeline": 2, "virtual_pipeline": 2, "expert": 2, "context": 2},
    ],
)
def test_layouts_a_model_with_experts_can_have(sizes: dict[str, Any]) -> None:
    check_layout(EXPERTS, parallel(**sizes), "Tiny")


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        (
            {"tensor": 3},
            4,
            "--nproc 4 is not a multiple of parallel.tensor x parallel.pipeline x parallel.context = 3 x 1 x 1 = 3; "
            "use a multiple of 3",
        ),
        ({"tensor": 2, "pipeline": 2, "context": 2}, 4, "= 2 x 2 x 2 = 8; use a multiple of 8"),
        (
            {"pipeline": 2, "expert": 4, "expert_tensor": 2},
            8,
            "--nproc 8 is not a multiple of parallel.pipeline x parallel.expert x parallel.expert_tensor = 2 x 4 x 2 = "
            "16; use a multiple of 16",
        ),
        ({"tensor": 4, "expert": 3}, 4, "= 1 x 3 x 1 = 3; use a multiple of 12"),
    ],
)
def test_ranks_hold_whole_copies(sizes: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_ranks(parallel(**sizes), ranks, "--nproc")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, 5),
        ({"tensor": 2, "pipeline": 2, "context": 2}, 24),
        ({"tensor": 4, "expert": 3}, 12),
        ({"expert": 4}, 4),
        ({"pipeline": 2, "expert": 2, "tensor": 2}, 4),
        ({"pipeline": 2, "expert": 4, "expert_tensor": 2}, 48),
    ],
)
def test_ranks_that_fit(sizes: dict[str, Any], ranks: int) -> None:
    check_ranks(parallel(**sizes), ranks, "--nproc")
