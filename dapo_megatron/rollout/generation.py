"""From a prompt to its group of graded answers."""

import asyncio
import itertools
import uuid
from collections.abc import Callable

import numpy as np

from dapo_megatron.algorithm.overlong import brevity_bonus, overlong_penalty
from dapo_megatron.config.algorithm import OverlongConfig
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.rewards import grade
from dapo_megatron.rollout.client import Generated, RequestError, Sampling
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.sampler import GroupFailedError
from dapo_megatron.types import Prompt, Sample


class Grader:
    """Gives an answer its reward: 1 if it is right and -1 if not (eq. 7), plus what its length adds (eq. 13, brevity).

    `max_tokens` is L_max.
    """

    def __init__(self, tokenizer: Tokenizer, rule: str, stop: list[str], overlong: OverlongConfig, max_tokens: int):
        self._tokenizer = tokenizer
        self._rule = rule
        self._stop = stop
        self._overlong = overlong
        self._max_tokens = max_tokens

    def sample(self, answer: Generated, ground_truth: str) -> Sample:
        """Judge one answer, in bounded time for any text."""
        verdict = grade(self._text(answer), ground_truth, self._rule)
        return Sample(
            token_ids=np.array(answer.token_ids, dtype=np.int32),
            log_probs=np.array(answer.log_probs, dtype=np.float32),
            finish_reason=answer.finish_reason,
            versions=answer.versions,
            correct=verdict.correct,
            reward=(1.0 if verdict.correct else -1.0) + self._length_reward(len(answer.token_ids), verdict.correct),
            reason=verdict.reason,
        )

    def _length_reward(self, length: int, correct: bool) -> float:
        rule = self._overlong
        penalty = overlong_penalty(length, self._max_tokens, rule.cache_tokens, rule.factor, rule.shift)
        return float(penalty + brevity_bonus(length, correct, self._max_tokens, rule.brevity))

    def _text(self, answer: Generated) -> str:
        """The text up to the first stop string: the token that ended the answer may hold more than that string."""
        text = self._tokenizer.decode(answer.token_ids)
        ends = [position for string in self._stop if (position := text.find(string)) >= 0]
        return text[: min(ends, default=len(text))]


class GroupGenerator:
    """Generates groups of `size` answers with `sampling`. Answers are graded as they finish, outside the event loop."""

    def __init__(self, fleet: Fleet, grader: Grader, sampling: Sampling, size: int):
        self._fleet = fleet
        self._grader = grader
        self._sampling = sampling
        self._size = size
        self._run = uuid.uuid4().hex[:12]  # request ids must differ from those of an earlier controller
        self._numbers = itertools.count()

    async def __call__(self, prompt: Prompt, on_answer: Callable[[Sample], None]) -> tuple[Sample, ...]:
        """All answers to `prompt`.

        Raises:
            GroupFailedError: when one of them failed for good. The others are cancelled then.
        """
        name = f"{self._run}-{next(self._numbers)}"
        with self._fleet.place(self._size) as server:
            tasks = [asyncio.create_task(self._answer(prompt, f"{name}-{i}", server)) for i in range(self._size)]
            try:
                for finished in asyncio.as_completed(tasks):
                    on_answer(await finished)
            except RequestError as error:
                raise GroupFailedError(str(error)) from error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(task.result() for task in tasks)

    async def _answer(self, prompt: Prompt, request_id: str, server: int) -> Sample:
        reply = await self._fleet.generate(prompt.token_ids, self._sampling, request_id, server)
        return await asyncio.to_thread(self._grader.sample, reply, prompt.ground_truth)
