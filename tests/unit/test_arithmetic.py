from itertools import accumulate

import pytest

from dapo_megatron.config.data import ArithmeticConfig
from dapo_megatron.data.arithmetic import generate
from dapo_megatron.data.rows import Row
from dapo_megatron.errors import UserError
from dapo_megatron.rewards import grade


def rows(**values: object) -> list[Row]:
    return generate(ArithmeticConfig.model_validate(values))


def numbers(line: str) -> tuple[int, ...]:
    return tuple(int(n) for n in line.partition("=")[0].split("+"))


def asked(row: Row) -> tuple[int, ...]:
    return numbers(str(row.prompt).splitlines()[-1])


def shots(row: Row) -> list[str]:
    return str(row.prompt).splitlines()[:-1]


@pytest.mark.parametrize("task", ["addition", "chain_sum"])
@pytest.mark.parametrize("seed", [0, 1])
def test_train_and_held_out_problems_do_not_overlap_in_any_order_of_terms(task: str, seed: int) -> None:
    train = rows(task=task, split="train", problems=4096, seed=0)
    test = rows(task=task, split="test", problems=1000, seed=seed)
    held_out = {tuple(sorted(asked(row))) for row in test}
    assert not held_out & {tuple(sorted(asked(row))) for row in train}
    assert not held_out & {tuple(sorted(numbers(shot))) for row in (*train[:1], *test[:1]) for shot in shots(row)}
    assert len({asked(row) for row in train}) == 4096
    assert len({asked(row) for row in test}) == 1000


@pytest.mark.parametrize("task", ["addition", "chain_sum"])
def test_the_answer_follows_from_the_question_and_from_each_example(task: str) -> None:
    for row in rows(task=task, problems=200):
        totals = list(accumulate(asked(row)))[1:]
        assert row.ground_truth == " ".join(map(str, totals))
        assert grade(f" {row.ground_truth}\n", row.ground_truth, "exact").correct
        for shot in shots(row):
            assert shot.partition("= ")[2] == " ".join(map(str, list(accumulate(numbers(shot)))[1:]))


def test_examples_are_the_same_everywhere_and_never_asked() -> None:
    train, test = rows(problems=6000), rows(split="test", problems=1000, seed=7)
    examples = shots(train[0])
    assert len(examples) == 4
    assert all(shots(row) == examples for row in (*train, *test))
    assert not {numbers(shot) for shot in examples} & {asked(row) for row in train}


def test_chain_sum_has_answers_of_different_lengths() -> None:
    lengths = [len(row.ground_truth.split()) for row in rows(task="chain_sum", terms=6, problems=500)]
    assert set(lengths) == {1, 2, 3, 4, 5}


def test_the_seed_alone_decides() -> None:
    assert rows(problems=50, seed=3) == rows(problems=50, seed=3)
    assert rows(problems=50, seed=3) != rows(problems=50, seed=4)
    assert len(rows(task="chain_sum", terms=32, problems=100)) == 100  # far too many problems to list


def test_asking_for_more_problems_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"test part of addition has only \d+ problems, 8000 were asked for"):
        rows(split="test", problems=8000)
