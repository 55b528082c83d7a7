"""Dynamic sampling in draw order (arXiv 2503.14476, eq. 11).

Prompts are drawn ahead of what is known, their groups finish in any order, and the batch is the first N mixed groups
in the order of the draws. Which groups are trained on therefore depends neither on speed nor on how many are in
flight: taking what arrives first would train on short answers.
"""

import asyncio
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dapo_megatron.algorithm.group_filter import mixed_groups
from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.history import GroupResult, Verdict
from dapo_megatron.rollout.forecast import Coverage, Forecast, group_size
from dapo_megatron.rollout.statistics import Draw, Outcome, batch_stats
from dapo_megatron.types import Group, Prompt, Sample


class GroupFailedError(Exception):
    """A group lost a member for good; it is dropped whole."""


@dataclass
class Progress:
    """What a sampling has done so far: `kept` of `needed` groups, prompts drawn, answers finished and their tokens."""

    needed: int = 0
    kept: int = 0
    drawn: int = 0
    answers: int = 0
    tokens: int = 0

    def add(self, sample: Sample) -> None:
        """Count a finished answer."""
        self.answers += 1
        self.tokens += len(sample.token_ids)


Generate = Callable[[Prompt, int, Callable[[Sample], None]], Awaitable[tuple[Sample, ...]]]
"""Answers a prompt with a group of so many answers and calls back for each. Raises GroupFailedError; may be cancelled.
"""


@dataclass(frozen=True)
class SampledBatch:
    """Groups to train on, in draw order; the rollout's metrics; the cursor's state right after the last group.

    `draws` are all draws of the step with what became of them. `exhausted`: the budget was used up before there were
    N groups.
    """

    groups: tuple[Group, ...]
    draws: tuple[Draw, ...]
    stats: dict[str, float]
    cursor: dict[str, Any]
    exhausted: bool


class Sampler:
    """Samples one batch after the other. `max_answers` bounds the answers generated at the same time (None: no bound);
    they are rounded up to whole groups.

    It changes how fast a batch is there, never which groups are in it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        cursor: PromptCursor,
        config: RolloutConfig,
        generate: Generate,
        max_answers: int | None = None,
    ):
        self._prompts = prompts
        self._cursor = cursor
        self._config = config
        self._generate = generate
        self._max_answers = max_answers

    async def sample_batch(self, progress: Progress) -> SampledBatch:
        """Sample until N groups are certain or the budget is used up (`wait_next` renews it).

        Whatever happens, no generation is left running; when it fails or is cancelled, the cursor stands where it was.
        """
        started = monotonic()
        progress.needed = self._config.prompts_per_step
        attempt = _Attempt(group_size(self._config, self._cursor.history.accuracy))
        try:
            await self._run(attempt, progress)
        except BaseException:
            await attempt.abort(attempt.running)
            self._cursor.requeue(attempt.indices)
            raise
        return self._finish(attempt, progress, started)

    async def _run(self, attempt: "_Attempt", progress: Progress) -> None:
        budget = self._config.prompt_budget
        while True:
            if len(attempt.kept) >= progress.needed:
                # Later draws cannot be in the batch any more; earlier ones can, so they are waited for.
                last = attempt.kept[progress.needed - 1]
                await attempt.abort(number for number in attempt.running if number > last)
            self._draw_ahead(attempt, progress, budget)
            progress.kept, progress.drawn = min(len(attempt.kept), progress.needed), len(attempt.indices)
            if attempt.running:
                await asyncio.wait(attempt.running.values(), return_when=asyncio.FIRST_COMPLETED)
                self._collect(attempt)
            elif (
                budget is not None and len(attempt.kept) < progress.needed and self._config.on_exhausted == "wait_next"
            ):
                budget += self._config.prompt_budget or 0
            else:
                return

    def _draw_ahead(self, attempt: "_Attempt", progress: Progress, budget: int | None) -> None:
        """Have as many groups in flight as the groups still needed will probably take."""
        missing = progress.needed - len(attempt.kept)
        if missing <= 0:
            return
        forecast = self._forecast(attempt.size, sum(attempt.accepted.values()), len(attempt.accepted))
        coverage = Coverage()
        for number in attempt.running:
            coverage.add(forecast(attempt.indices[number]))
        left = math.inf if budget is None else budget - len(attempt.indices)
        groups = math.inf if self._max_answers is None else math.ceil(self._max_answers / attempt.size)
        slots = min(left, groups - len(attempt.running))
        while slots > 0 and not coverage.reaches(missing):
            slots -= 1
            coverage.add(forecast(self._draw(attempt, progress)))

    def _forecast(self, size: int, mixed: int = 0, groups: int = 0) -> Forecast:
        return Forecast(self._cursor.history, size, self._config.dynamic_sampling, mixed, groups)

    def _draw(self, attempt: "_Attempt", progress: Progress) -> int:
        index = self._cursor.draw()
        number = len(attempt.indices)
        attempt.indices.append(index)
        attempt.answers.append([])
        task = self._sample_group(attempt, number, self._cursor.drawn - 1, progress)
        attempt.running[number] = asyncio.ensure_future(task)
        return index

    async def _sample_group(self, attempt: "_Attempt", number: int, draw: int, progress: Progress) -> Group | None:
        """The complete group, or None when it failed."""
        prompt = self._prompts[attempt.indices[number]]

        def on_answer(sample: Sample) -> None:
            attempt.answers[number].append(sample)
            progress.add(sample)

        try:
            return Group(draw, prompt, await self._generate(prompt, attempt.size, on_answer))
        except GroupFailedError:
            return None

    def _collect(self, attempt: "_Attempt") -> None:
        for number in [number for number, task in attempt.running.items() if task.done()]:
            group = attempt.running.pop(number).result()
            attempt.finished[number] = group
            accepted = group is not None and (not self._config.dynamic_sampling or is_mixed(group))
            attempt.accepted[number] = accepted
            if accepted:
                insort(attempt.kept, number)

    def _finish(self, attempt: "_Attempt", progress: Progress, started: float) -> SampledBatch:
        kept = attempt.kept[: progress.needed]
        exhausted = len(kept) < progress.needed
        taken = len(attempt.indices) if exhausted else kept[-1] + 1
        self._cursor.requeue(attempt.indices[taken:])
        draws = self._draws(attempt, taken)
        forecast = self._forecast(attempt.size)
        stats = batch_stats(draws) | {
            "acceptance_forecast": sum(map(forecast, attempt.indices[:taken])) / taken,
            "group_size": float(attempt.size),
        }
        results = [_result(group) if (group := attempt.finished[n]) else None for n in range(taken)]
        stats |= self._cursor.finish_step(results)
        stats["seconds"] = monotonic() - started
        groups = tuple(group for number in kept if (group := attempt.finished[number]) is not None)
        return SampledBatch(groups, draws, stats, self._cursor.state_dict(), exhausted)

    def _draws(self, attempt: "_Attempt", taken: int) -> tuple[Draw, ...]:
        first = self._cursor.drawn - taken
        return tuple(
            Draw(
                first + number,
                self._prompts[index],
                _outcome(attempt, number, taken),
                tuple(attempt.answers[number]),
            )
            for number, index in enumerate(attempt.indices)
        )


class _Attempt:
    """The draws of one batch, numbered from 0, each with a group of `size` answers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.indices: list[int] = []  # the prompt of each draw
        self.answers: list[list[Sample]] = []  # of each draw, as they finish
        self.running: dict[int, asyncio.Future[Group | None]] = {}
        self.finished: dict[int, Group | None] = {}  # None: failed
        self.accepted: dict[int, bool] = {}  # whether a finished draw's group can be trained on
        self.kept: list[int] = []  # draws whose group can be trained on, ascending

    async def abort(self, numbers: Iterable[int]) -> None:
        """Cancel draws and wait until they have ended."""
        tasks = [self.running.pop(number) for number in list(numbers)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_mixed(group: Group) -> bool:
    """Whether a group carries a learning signal: by score (correctness, by rule), never by shaped reward."""
    scores = [sample.score for sample in group.samples]
    return mixed_groups(scores, [group.draw] * len(scores))[group.draw]


def _verdict(group: Group) -> Verdict:
    if is_mixed(group):
        return "mixed"
    return "solved" if all(sample.correct for sample in group.samples) else "unsolvable"


def _result(group: Group) -> GroupResult:
    return GroupResult(sum(sample.correct for sample in group.samples), len(group.samples), _verdict(group))


def _outcome(attempt: _Attempt, number: int, taken: int) -> Outcome:
    """What became of a draw, when the first `taken` count and those after them go back."""
    if number >= taken:
        return "surplus" if number in attempt.finished else "aborted"
    group = attempt.finished[number]
    if group is None:
        return "failed"
    if attempt.accepted[number]:
        return "kept"
    return "all_right" if _verdict(group) == "solved" else "all_wrong"
