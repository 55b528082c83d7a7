"""Which groups carry a signal."""

import subprocess
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm.group_filter import mixed_groups

TABLE = [
    ([0, 0], False),
    ([0, 1], True),
    ([1, 1], False),
    ([1, 0], True),
    ([0.1] * 7, False),
    ([-0.95] * 11, False),
    ([0, 0, 0, 1], True),
]


@pytest.mark.parametrize(("scores", "kept"), TABLE)
def test_table(scores: list[float], kept: bool) -> None:
    assert mixed_groups(scores, [7] * len(scores)) == {7: kept}
    assert mixed_groups(np.array(scores, np.float32), np.full(len(scores), 7, np.int32)) == {7: kept}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40), st.randoms())
def test_is_by_id_and_counts_right_answers(responses: list[tuple[int, bool]], random: Random) -> None:
    expected = {
        group: 0 < sum(right for g, right in responses if g == group) < sum(g == group for g, _ in responses)
        for group in dict.fromkeys(g for g, _ in responses)
    }
    result = mixed_groups([right for _, right in responses], [group for group, _ in responses])
    assert result == expected
    assert list(result) == list(expected)  # order of first appearance
    random.shuffle(responses)
    assert mixed_groups([right for _, right in responses], [group for group, _ in responses]) == expected


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="shorter"):
        mixed_groups([1, 0], [0])


def test_controller_modules_load_no_torch() -> None:
    """The rollout controller filters, punishes and grades; its interpreter must start fast."""
    script = (
        "import sys\n"
        "from dapo_megatron.algorithm.group_filter import mixed_groups\n"
        "from dapo_megatron.algorithm.overlong import overlong_penalty\n"
        "from dapo_megatron.rewards import grade\n"
        "import dapo_megatron.evaluation.statistics\n"
        "mixed_groups([1, 0], [0, 0]), overlong_penalty([90], 100, 20), grade('Answer: 1', '1')\n"
        "print(sorted({'torch', 'megatron', 'vllm'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
