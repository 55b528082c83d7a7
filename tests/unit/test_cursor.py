import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.rollout import HistoryConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.history import GroupResult
from dapo_megatron.errors import UserError


def draws(cursor: PromptCursor, count: int) -> list[int]:
    return [cursor.draw() for _ in range(count)]


def test_every_epoch_draws_each_prompt_once_in_its_own_order() -> None:
    order = draws(PromptCursor(50, seed=1, shuffle=True), 150)
    epochs = [order[:50], order[50:100], order[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order != draws(PromptCursor(50, seed=2, shuffle=True), 150)
    assert draws(PromptCursor(3, seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30), st.integers(1, 7))
def test_putting_back_and_resuming_leave_the_order_as_it_was(moves: list[tuple[int, int]], prompts: int) -> None:
    reference = draws(PromptCursor(prompts, seed=5, shuffle=True), 300)
    cursor, seen = PromptCursor(prompts, seed=5, shuffle=True), []
    for count, back in moves:
        first, drawn = cursor.drawn, draws(cursor, count)
        kept = max(0, count - back)
        cursor.requeue(range(first + kept, first + count))
        seen += drawn[:kept]
        state = json.loads(json.dumps(cursor.state_dict()))
        cursor = PromptCursor(prompts, seed=5, shuffle=True)
        cursor.load_state_dict(state)
    assert seen == reference[: len(seen)]


def test_only_draws_of_the_step_can_be_put_back() -> None:
    cursor = PromptCursor(10, seed=1, shuffle=True)
    first = draws(cursor, 1)
    cursor.finish_step([None])
    second, third = draws(cursor, 2)
    for wrong in ([0], [1, 2, 3]):
        with pytest.raises(ValueError, match="only draws of the step"):
            cursor.requeue(wrong)
    cursor.requeue([1, 2])
    assert [*first, *draws(cursor, 2)] == [first[0], second, third]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=8), max_size=8), st.integers(1, 7), st.booleans())
def test_any_draws_put_back_come_first_in_the_next_step_under_their_numbers(
    steps: list[list[bool]], prompts: int, acts: bool
) -> None:
    """Each number is drawn until it is kept, once, always for the same prompt; in the end none is left out."""
    rules = HistoryConfig(rest_after=1, hard_every=3) if acts else HistoryConfig()
    cursor = PromptCursor(prompts, seed=5, shuffle=True, rules=rules)
    drawn_as: dict[int, int] = {}
    kept: set[int] = set()
    owed: list[int] = []  # numbers that were put back though a later one was kept
    for keep in steps:
        before = json.loads(json.dumps(cursor.state_dict()))
        numbers = []
        for _ in keep:
            prompt = cursor.draw()
            numbers.append(cursor.number)
            if cursor.number in owed:
                assert drawn_as[cursor.number] == prompt
            drawn_as[cursor.number] = prompt
        assert numbers == sorted(numbers)
        assert numbers[: len(owed)] == owed[: len(numbers)]
        cursor.requeue(numbers)
        assert cursor.state_dict() == before
        again = [(cursor.draw(), cursor.number) for _ in keep]
        assert again == [(drawn_as[number], number) for number in numbers]
        put_back = {number for number, kept_now in zip(numbers, keep, strict=True) if not kept_now}
        for some in (list(put_back)[::2], list(put_back)[1::2]):  # in which portions does not matter
            cursor.requeue(some)
        cursor.finish_step([GroupResult(1, 2, "mixed")] * (len(keep) - len(put_back)))
        assert not kept & (set(numbers) - put_back)
        kept |= set(numbers) - put_back
        owed = [number for number in range(max(kept, default=-1)) if number not in kept]
        state = json.loads(json.dumps(cursor.state_dict()))
        assert (state["drawn"], [draw[0] for draw in state["waiting"]]) == (max(kept, default=-1) + 1, owed)
        cursor = PromptCursor(prompts, seed=5, shuffle=True, rules=rules)
        cursor.load_state_dict(state)
    if not acts:
        assert all(
            drawn_as[number] == prompt
            for number, prompt in enumerate(reference_order(prompts, max(kept, default=-1) + 1))
        )


def reference_order(prompts: int, count: int) -> list[int]:
    return draws(PromptCursor(prompts, seed=5, shuffle=True), count)


@pytest.mark.parametrize("other", [PromptCursor(9, 1, True, "a"), PromptCursor(10, 1, True, "b")])
def test_a_state_of_other_data_is_refused(other: PromptCursor) -> None:
    with pytest.raises(UserError, match="training data changed"):
        other.load_state_dict(PromptCursor(10, 1, True, "a").state_dict())


@pytest.mark.parametrize("other", [PromptCursor(10, 2, True, "a"), PromptCursor(10, 1, False, "a")])
def test_a_state_of_another_order_is_refused(other: PromptCursor) -> None:
    with pytest.raises(UserError, match=r"run\.seed or data\.shuffle"):
        other.load_state_dict(PromptCursor(10, 1, True, "a").state_dict())
