"""The rules by which a response is judged, by name, and the one way to apply them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dapo_megatron.errors import UserError
from dapo_megatron.rewards.answers import MAX_ANSWER, equivalent, extract_answer, normalise

Reason = Literal["correct", "wrong", "no_answer", "bad_gold", "bad_reward"]


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    `extracted` is the answer as it stands in the response, None without one. `reason` is what metrics count:
    `correct`, `wrong` (an answer was found and differs), `no_answer` (none was found, which is wrong), `bad_gold`
    (the gold answer is empty or longer than any answer can be, so that nothing equals it), `bad_reward` (the reward
    function failed: no rule says so).
    """

    correct: bool
    extracted: str | None
    reason: Reason


def grade(response: str, gold: str, rule: str = "dapo") -> Grade:
    """Judge a response against the gold answer. Never raises for any text, in time that does not grow with it.

    Rules: `dapo`, the last `Answer: ...` of the last 300 characters, both sides normalised; `exact`, the whole
    response equals the gold answer, surrounding white space aside.

    Raises UserError for an unknown rule.
    """
    if rule not in RULES:
        raise UserError(f"Unknown reward rule '{rule}': choose one of {', '.join(RULES)}.")
    return RULES[rule](response, gold)


def _grade_dapo(response: str, gold: str) -> Grade:
    answer = extract_answer(response)
    if answer is None or not normalise(answer):
        return Grade(False, None, "no_answer")
    if len(gold) > MAX_ANSWER or not normalise(gold):
        return Grade(False, answer, "bad_gold")
    return _compared(equivalent(answer, gold), answer)


def _grade_exact(response: str, gold: str) -> Grade:
    answer, expected = response.strip(), gold.strip()
    if not answer:
        return Grade(False, None, "no_answer")
    if not expected:
        return Grade(False, answer[-MAX_ANSWER:], "bad_gold")
    return _compared(answer == expected, answer[-MAX_ANSWER:])


def _compared(equal: bool, answer: str) -> Grade:
    return Grade(equal, answer, "correct" if equal else "wrong")


RULES: dict[str, Callable[[str, str], Grade]] = {"dapo": _grade_dapo, "exact": _grade_exact}
"""Every rule by its name in the configuration."""
