"""From an answer to its reward."""

import logging
import threading
from dataclasses import dataclass

from dapo_megatron.algorithm.overlong import brevity_bonus, overlong_penalty
from dapo_megatron.config.algorithm import OverlongConfig
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.rewards import Answer, BadRewardError, Reason, RewardFunction, grade, judge
from dapo_megatron.rewards.answers import MAX_ANSWER
from dapo_megatron.rollout.requests import Generated
from dapo_megatron.types import NO_STEPS, Prompt, Sample, Steps

SHOWN_FAILURES = 10
"""Failures of the reward function that are logged one by one in a step."""

LAST_TOKENS = 1024
"""Of an answer, in which the rule `dapo` probably finds the characters that it looks at."""

SPARE_CHARACTERS = 16
"""At the beginning of the last tokens, which may decode to something else without the token before them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Judged:
    """An answer before its length counts. `outcome` is the reward of the whole; the rest is as in `Sample`."""

    correct: bool
    outcome: float
    score: float
    reason: Reason
    steps: Steps = NO_STEPS


class Grader:
    """Gives an answer its reward: 1 if it is right and -1 if not (eq. 7), plus what its length adds (eq. 13, brevity).

    `max_tokens` is L_max. Where there is a reward `function`, its number takes the place of 1 and -1, or its process
    rewards come beside them. An answer for which it fails counts as wrong, and the log says why.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rule: str,
        stop: list[str],
        overlong: OverlongConfig,
        max_tokens: int,
        function: RewardFunction | None = None,
    ):
        self._tokenizer = tokenizer
        self._rule = rule
        self._stop = stop
        self._overlong = overlong
        self._max_tokens = max_tokens
        self._function = function
        self._failures = 0  # of the function, in this step
        self._lock = threading.Lock()  # answers are judged in several threads

    def sample(self, answer: Generated, prompt: Prompt, by_rule: bool = False) -> Sample:
        """Judge one whole answer; in bounded time for any text, as far as it is not for the function. Never raises.

        `by_rule`: without the function.
        """
        judged = self._judge(answer, prompt, None if by_rule else self._function)
        return Sample(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            finish_reason=answer.finish_reason,
            versions=answer.versions,
            correct=judged.correct,
            reward=judged.outcome + self._length_reward(len(answer.token_ids), judged.correct),
            score=judged.score,
            reason=judged.reason,
            steps=judged.steps,
            routes=answer.routes,
        )

    def end_step(self, step: int) -> None:
        """Log how often the function failed in a step if not all of it was shown, and start a new count."""
        with self._lock:
            failures, self._failures = self._failures, 0
        if failures > SHOWN_FAILURES:
            logger.warning("step %d: %d bad rewards, of which %d are shown", step, failures, SHOWN_FAILURES)

    def _judge(self, answer: Generated, prompt: Prompt, function: RewardFunction | None) -> _Judged:
        text = self._end(answer) if function is None else self._text(answer)
        verdict = grade(text, prompt.ground_truth, self._rule)
        by_rule = 1.0 if verdict.correct else -1.0
        if function is None:
            return _Judged(verdict.correct, by_rule, float(verdict.correct), verdict.reason)
        try:
            rewards = judge(function, self._seen(answer, prompt, text, verdict.correct))
        except BadRewardError as error:
            self._tell(prompt, error)
            return _Judged(correct=False, outcome=-1.0, score=0.0, reason="bad_reward")
        if isinstance(rewards, Steps):
            return _Judged(verdict.correct, by_rule, float(verdict.correct), verdict.reason, rewards)
        return _Judged(verdict.correct, rewards, rewards, verdict.reason)

    def _seen(self, answer: Generated, prompt: Prompt, text: str, correct: bool) -> Answer:
        token_ids = tuple(answer.token_ids.tolist())
        return Answer(
            text=text,
            token_ids=token_ids,
            token_texts=self._tokenizer.token_texts(token_ids),
            prompt_token_ids=prompt.token_ids,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            correct=correct,
            finish_reason=answer.finish_reason,
        )

    def _tell(self, prompt: Prompt, error: BadRewardError) -> None:
        with self._lock:
            self._failures += 1
            number = self._failures
        if number <= SHOWN_FAILURES:
            trace = error.__cause__ if number == 1 else None  # one is enough to find the line
            logger.warning("bad reward of an answer to prompt %d: %s", prompt.id, error, exc_info=trace)

    def _length_reward(self, length: int, correct: bool) -> float:
        rule = self._overlong
        penalty = overlong_penalty(length, self._max_tokens, rule.cache_tokens, rule.factor, rule.shift)
        return float(penalty + brevity_bonus(length, correct, self._max_tokens, rule.brevity))

    def _end(self, answer: Generated) -> str:
        """As much of the text as the rule looks at: to decode long answers whole takes a quarter of all the time."""
        if self._rule == "dapo" and not self._stop:
            text = self._tokenizer.decode(answer.token_ids[-LAST_TOKENS:].tolist())
            if len(text) >= MAX_ANSWER + SPARE_CHARACTERS:
                return text
        return self._text(answer)

    def _text(self, answer: Generated) -> str:
        """The text up to the first stop string: the token that ended the answer may hold more than that string."""
        text = self._tokenizer.decode(answer.token_ids.tolist())
        ends = [position for string in self._stop if (position := text.find(string)) >= 0]
        return text[: min(ends, default=len(text))]
