"""The record of each prompt, and draws that it changes: prompts that rest, hard ones drawn in between."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.config.rollout import HistoryConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.history import GroupResult, Place, PromptHistory, PromptRecord

SOLVED, MIXED, HARD = GroupResult(4, 4, "solved"), GroupResult(1, 4, "mixed"), GroupResult(0, 4, "unsolvable")
RESULTS = {"s": SOLVED, "m": MIXED, "h": HARD, "f": None}


def results(text: str) -> list[GroupResult | None]:
    return [RESULTS[letter] for letter in text]


def play(cursor: PromptCursor, outcomes: str) -> tuple[list[int], dict[str, float]]:
    """A step with these outcomes: the prompts drawn, and the metrics."""
    drawn = [cursor.draw() for _ in outcomes]
    return drawn, cursor.finish_step(results(outcomes))


def in_order(prompts: int, **rules: int) -> PromptCursor:
    return PromptCursor(prompts, seed=0, shuffle=False, rules=HistoryConfig.model_validate(rules))


def test_a_prompts_record_and_the_running_figures() -> None:
    history = PromptHistory()
    assert (history.accuracy, history.pass_rate(0), history.acceptance()) == (None, None, 1.0)
    history.add_step([Place(0, 0, 0), Place(1, 1, 0), Place(2, 2, 0)], results("smf"))
    history.add_step([Place(0, 3, 1), Place(1, 4, 1)], results("sh"))
    assert history.records == {
        0: PromptRecord(right=8, answers=8, drawn=2, streak=2, verdict="solved", last_draw=3, last_epoch=1),
        1: PromptRecord(right=1, answers=8, drawn=2, streak=0, verdict="unsolvable", last_draw=4, last_epoch=1),
    }
    assert history.accuracy == (0.75 * 5 + 4) / (0.75 * 8 + 8)
    assert history.acceptance() == (1 + 0.75 * 1) / (1 + 0.75 * 3 + 2)
    assert history.pass_rate(1) == pytest.approx((1 + 8 * history.accuracy) / (8 + 8), abs=1e-12)
    assert history.pass_rate(2) is None  # a failed group says nothing
    assert history.counts() == {"history/solved": 1, "history/unsolvable": 1, "history/mixed": 0}


def test_hard_prompts_come_in_the_order_in_which_they_were_last_drawn() -> None:
    history = PromptHistory()
    history.add_step([Place(prompt, draw, 0) for draw, prompt in enumerate([4, 2, 7, 5])], results("hhmh"))
    history.add_step([Place(4, 4, 0)], results("h"))
    assert history.hard_prompts() == [2, 5, 4]


def test_the_state_is_compact_json_of_prompts_drawn() -> None:
    cursor = in_order(10_000)
    play(cursor, "smhf")
    state = cursor.state_dict()
    assert state["history"]["prompts"] == [[0, 4, 4, 1, 1, 0, 0, 0], [1, 1, 4, 1, 0, 2, 1, 0], [2, 0, 4, 1, 0, 1, 2, 0]]
    restored = in_order(10_000)
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.history.records == cursor.history.records
    assert restored.history.running == cursor.history.running
    assert restored.state_dict() == state


def test_a_state_of_before_there_was_a_history_is_continued() -> None:
    cursor = in_order(5)
    cursor.load_state_dict({"drawn": 7, "num_prompts": 5, "fingerprint": "", "seed": 0, "shuffle": False})
    assert (cursor.draw(), cursor.drawn, cursor.history.records) == (2, 8, {})


def test_solved_prompts_rest_for_an_epoch() -> None:
    cursor = in_order(4, rest_after=2, rest_epochs=1)
    assert play(cursor, "smhs")[0] == [0, 1, 2, 3]
    drawn, stats = play(cursor, "ssms")  # once is not enough
    assert (drawn, stats["rested"]) == ([0, 1, 2, 3], 0)
    drawn, stats = play(cursor, "ss")  # 0 and 3 were solved twice running
    assert (drawn, stats["rested"]) == ([1, 2], 1)
    drawn, stats = play(cursor, "sssm")  # in the epoch after they are back, and 1, solved twice too now, rests
    assert (drawn, stats["rested"]) == ([0, 2, 3, 0], 2)


def test_an_awake_prompt_is_found_across_the_end_of_an_epoch() -> None:
    cursor = in_order(3, rest_after=1, rest_epochs=2)
    play(cursor, "mss")
    drawn, stats = play(cursor, "mmm")  # epochs 1 and 2 have prompt 0 alone, epoch 3 all
    assert (drawn, stats["rested"]) == ([0, 0, 0], 4)
    assert play(cursor, "mm")[0] == [1, 2]


def test_where_all_prompts_would_rest_they_are_drawn() -> None:
    cursor = in_order(3, rest_after=1, rest_epochs=1000)
    play(cursor, "sss")
    drawn, stats = play(cursor, "sss")
    assert (drawn, stats["rested"]) == ([0, 1, 2], 0)
    play(cursor, "m")  # now one is awake, the others rest again
    assert play(cursor, "mmm")[0] == [0, 0, 0]


def test_every_third_draw_is_of_a_hard_prompt_while_there_are_some() -> None:
    cursor = in_order(8, hard_every=3)
    drawn, stats = play(cursor, "mhmhmm")
    assert (drawn, stats["hard_draws"]) == ([0, 1, 2, 3, 4, 5], 0)  # none known yet
    drawn, stats = play(cursor, "mmhmmhmhm")  # 1 and 3 are; after them the pool of this step is empty
    assert (drawn, stats["hard_draws"]) == ([6, 7, 1, 0, 1, 3, 2, 3, 4], 2)
    drawn, stats = play(cursor, "mmm")
    assert (drawn, stats["hard_draws"]) == ([5, 6, 3], 1)  # 1 was last drawn with a mixed group


def test_a_step_has_one_result_per_draw() -> None:
    cursor = in_order(3)
    cursor.draw()
    with pytest.raises(ValueError, match="zip"):
        cursor.finish_step([])


STEPS = st.lists(st.tuples(st.text("smhf", min_size=1, max_size=12), st.integers(0, 8)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    STEPS,
    st.integers(1, 7),
    st.none() | st.integers(1, 2),
    st.integers(1, 3),
    st.none() | st.integers(2, 4),
    st.booleans(),
)
def test_draws_are_a_function_of_the_state_at_the_steps_start_and_of_their_number(
    steps: list[tuple[str, int]],
    prompts: int,
    rest_after: int | None,
    rest_epochs: int,
    hard_every: int | None,
    shuffle: bool,
) -> None:
    """However many are put back and drawn again, and whether or not the run was resumed in between."""
    rules = HistoryConfig(rest_after=rest_after, rest_epochs=rest_epochs, hard_every=hard_every)
    plain, other = (PromptCursor(prompts, 5, shuffle, rules=rules) for _ in range(2))
    for outcomes, more in steps:
        before = json.loads(json.dumps(other.state_dict()))
        first, drawn = other.drawn, [other.draw() for _ in range(len(outcomes) + more)]
        other.requeue(range(first, other.drawn))
        assert other.state_dict() == before
        other = PromptCursor(prompts, 5, shuffle, rules=rules)
        other.load_state_dict(before)
        assert [other.draw() for _ in drawn] == drawn
        other.requeue(range(first + len(outcomes), other.drawn))
        expected = play(plain, outcomes)
        assert (drawn[: len(outcomes)], other.finish_step(results(outcomes))) == expected
        assert other.state_dict() == plain.state_dict()
    if rest_after is None and hard_every is None:
        assert plain.state_dict()["position"] == plain.drawn
