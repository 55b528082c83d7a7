import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_megatron.data.cursor import PromptCursor
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


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30), st.integers(1, 7))
def test_putting_back_and_resuming_leave_the_order_as_it_was(moves: list[tuple[int, int]], prompts: int) -> None:
    reference = draws(PromptCursor(prompts, seed=5, shuffle=True), 300)
    cursor, seen = PromptCursor(prompts, seed=5, shuffle=True), []
    for count, back in moves:
        drawn = draws(cursor, count)
        kept = max(0, count - back)
        cursor.requeue(drawn[kept:])
        seen += drawn[:kept]
        state = json.loads(json.dumps(cursor.state_dict()))
        cursor = PromptCursor(prompts, seed=5, shuffle=True)
        cursor.load_state_dict(state)
    assert seen == reference[: len(seen)]


def test_only_the_last_draws_in_their_order_can_be_put_back() -> None:
    cursor = PromptCursor(10, seed=1, shuffle=True)
    first, second, third = draws(cursor, 3)
    for wrong in ([first], [third, second], [first, second, third, first]):
        with pytest.raises(ValueError, match="last prompts drawn"):
            cursor.requeue(wrong)
    cursor.requeue([second, third])
    assert draws(cursor, 2) == [second, third]


@pytest.mark.parametrize("other", [PromptCursor(9, 1, True, "a"), PromptCursor(10, 1, True, "b")])
def test_a_state_of_other_data_is_refused(other: PromptCursor) -> None:
    with pytest.raises(UserError, match="training data changed"):
        other.load_state_dict(PromptCursor(10, 1, True, "a").state_dict())


@pytest.mark.parametrize("other", [PromptCursor(10, 2, True, "a"), PromptCursor(10, 1, False, "a")])
def test_a_state_of_another_order_is_refused(other: PromptCursor) -> None:
    with pytest.raises(UserError, match=r"run\.seed or data\.shuffle"):
        other.load_state_dict(PromptCursor(10, 1, True, "a").state_dict())
