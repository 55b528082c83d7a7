"""Attention with context parallelism: outputs and gradients of one rank, and memory that grows with the length."""

from typing import Any

import pytest

from tests.distributed.launch import Launcher

WORKER = "tests.distributed.context_worker"
# Of the norm of the output and of each gradient, summed over all ranks.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
LONG = 20480  # tokens: the longest answer of the DAPO recipe

pytestmark = pytest.mark.timeout(600)

Outcome = dict[str, dict[str, Any]]


def make_case(name: str, lengths: list[int], cp: int = 2, **options: Any) -> dict[str, Any]:
    """Lengths are given in chunks: of 2 * CP tokens each."""
    whole = sorted(2 * cp * chunk for chunk in lengths)
    return {
        "name": name,
        "lengths": whole,
        "cp": cp,
        "heads": 4,
        "kv_heads": 2,
        "dim": 16,
        "dtype": "float64",
    } | options


def common_cases(cp: int) -> list[dict[str, Any]]:
    """Short and long sequences meet every way of computing: scores written out or fused, with and without padding."""
    ragged = [1, 1, 2, 5, 17, 18, 40, 43, 100, 101, 230]
    return [
        make_case("shortest", [1], cp),
        make_case("shortest, many", [1] * 7, cp),
        make_case("equally long", [60] * 3, cp),
        make_case("ragged", ragged, cp),
        make_case("ragged, fp32", ragged, cp, dtype="float32"),
        make_case("ragged, bf16", ragged, cp, dtype="bfloat16", against_fp64=True),
        make_case("one KV head", ragged, cp, heads=6, kv_heads=1),
        make_case("no grouped queries", ragged, cp, heads=3, kv_heads=3),
        make_case("one long, many short", [1, 1, 2, 2, 3, 3, 4, 600], cp),
        make_case("chunks of many blocks of queries", [1100], cp, heads=2, kv_heads=1, dim=8),
        make_case("padded blocks of queries", [520, 600, 640], cp, heads=2, kv_heads=1, dim=8),
        make_case("recomputed", ragged, cp, recompute="not reentrant"),
        make_case("recomputed as megatron does", ragged, cp, recompute="reentrant"),
        make_case("group given", ragged, cp, given=True),
    ]


CASES = {
    2: common_cases(2),
    4: [
        *common_cases(4),
        make_case("two groups of two", [1, 2, 40, 300], 2),
        make_case("long", [LONG // 8], 4, dtype="float32", measure=True),
    ],
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    return {ranks: run_ranks(ranks, WORKER, {"cases": c}, tmp_path_factory.mktemp("cp")) for ranks, c in CASES.items()}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, id=f"{ranks} ranks, {case['name']}")
        for ranks, cases in CASES.items()
        for case in cases
        if case["dtype"] in TOLERANCE and not case.get("measure")
    ],
)
def test_context_parallel_attention_is_exact(outcomes: dict[int, Outcome], ranks: int, case: dict[str, Any]) -> None:
    found = outcomes[ranks][case["name"]]
    assert found["dtypes"] == [f"torch.{case['dtype']}"]
    assert max(found["error"].values()) <= TOLERANCE[case["dtype"]], found["error"]


@pytest.mark.parametrize("ranks", CASES)
def test_bf16_rounds_no_worse_than_on_one_rank(outcomes: dict[int, Outcome], ranks: int) -> None:
    found = outcomes[ranks]["ragged, bf16"]
    assert found["dtypes"] == ["torch.bfloat16"]
    for name, error in found["rounding"].items():
        assert error <= 1.5 * found["rounding_alone"][name], name


def test_long_sequence_needs_little_memory(outcomes: dict[int, Outcome]) -> None:
    """20,480 tokens at CP 4, forward and backward. A mask of 5,120 x 20,480 alone would take 100 MiB, in fp32 400."""
    found = outcomes[4]["long"]
    print(f"peak {found['peak_rss'] / 2**30:.2f} GiB, grew {found['growth'] / 2**20:.0f} MiB, {found['seconds']:.1f} s")
    assert found["peak_rss"] < 4 * 2**30
    assert found["growth"] < 160 * 2**20
