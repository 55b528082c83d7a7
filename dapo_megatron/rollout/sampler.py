"""Dynamic sampling in draw order (arXiv 2503.14476, eq. 11).

Prompts are drawn ahead of what is known, their groups finish in any order, and the batch is the first N mixed groups
in the order of the draws. Which groups are trained on therefore depends neither on speed nor on how many are in
flight: taking what arrives first would train on short answers.
"""

import asyncio
import math
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dapo_megatron.algorithm.group_filter import mixed_groups
from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.rollout.statistics import batch_stats
from dapo_megatron.types import Group, Prompt, Sample

RECENT_GROUPS = 1024
"""Groups from which the acceptance rate is estimated."""


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


Generate = Callable[[Prompt, Callable[[Sample], None]], Awaitable[tuple[Sample, ...]]]
"""Answers a prompt with a whole group and calls back for each answer. Raises GroupFailedError; may be cancelled."""


@dataclass(frozen=True)
class SampledBatch:
    """Groups to train on, in draw order; the rollout's metrics; the cursor's state right after the last group.

    `exhausted`: the budget was used up before there were N groups.
    """

    groups: tuple[Group, ...]
    stats: dict[str, float]
    cursor: dict[str, Any]
    exhausted: bool


class Sampler:
    """Samples one batch after the other. `max_in_flight` bounds the groups generated at the same time (None: no bound).

    It changes how fast a batch is there, never which groups are in it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        cursor: PromptCursor,
        config: RolloutConfig,
        generate: Generate,
        max_in_flight: int | None = None,
    ):
        self._prompts = prompts
        self._cursor = cursor
        self._config = config
        self._generate = generate
        self._max_in_flight = max_in_flight or math.inf
        self._accepted: deque[bool] = deque(maxlen=RECENT_GROUPS)

    async def sample_batch(self, progress: Progress) -> SampledBatch:
        """Sample until N groups are certain or the budget is used up (`wait_next` renews it).

        Whatever happens, no generation is left running; when it fails or is cancelled, the cursor stands where it was.
        """
        started = monotonic()
        progress.needed = self._config.prompts_per_step
        attempt = _Attempt()
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
            for _ in range(self._draws_wanted(attempt, progress.needed, budget)):
                self._draw(attempt, progress)
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

    def _draws_wanted(self, attempt: "_Attempt", needed: int, budget: int | None) -> int:
        """Keep as many groups in flight as the groups still needed will probably take.

        At acceptance rate p, k accepted groups take k / p draws on average, with the standard deviation
        sqrt(k (1 - p)) / p (negative binomial). One deviation more than the average is in flight, so that a batch
        rarely waits for one more round at its end.
        """
        missing = needed - len(attempt.kept)
        if missing <= 0:
            return 0
        acceptance = (1 + sum(self._accepted)) / (1 + len(self._accepted))
        expected = (missing + math.sqrt(missing * (1 - acceptance))) / acceptance
        target = min(math.ceil(expected), self._max_in_flight)
        left = math.inf if budget is None else budget - len(attempt.indices)
        return max(0, int(min(target - len(attempt.running), left)))

    def _draw(self, attempt: "_Attempt", progress: Progress) -> None:
        index = self._cursor.draw()
        number = len(attempt.indices)
        attempt.indices.append(index)
        attempt.running[number] = asyncio.ensure_future(self._sample_group(index, self._cursor.drawn - 1, progress))

    async def _sample_group(self, index: int, draw: int, progress: Progress) -> Group | None:
        """The complete group, or None when it failed."""
        prompt = self._prompts[index]
        try:
            return Group(draw, prompt, await self._generate(prompt, progress.add))
        except GroupFailedError:
            return None

    def _collect(self, attempt: "_Attempt") -> None:
        for number in [number for number, task in attempt.running.items() if task.done()]:
            group = attempt.running.pop(number).result()
            attempt.finished[number] = group
            accepted = group is not None and (not self._config.dynamic_sampling or is_mixed(group))
            self._accepted.append(accepted)
            if accepted:
                insort(attempt.kept, number)

    def _finish(self, attempt: "_Attempt", progress: Progress, started: float) -> SampledBatch:
        kept = attempt.kept[: progress.needed]
        exhausted = len(kept) < progress.needed
        taken = len(attempt.indices) if exhausted else kept[-1] + 1
        self._cursor.requeue(attempt.indices[taken:])
        surplus = sum(number >= taken for number in attempt.finished)
        groups = tuple(group for number in kept if (group := attempt.finished[number]) is not None)
        stats = batch_stats(
            drawn=[attempt.finished[number] for number in range(taken)],
            kept=groups,
            surplus=surplus,
            aborted=len(attempt.indices) - taken - surplus,
        )
        stats |= {"generated_tokens": float(progress.tokens), "seconds": monotonic() - started}
        return SampledBatch(groups, stats, self._cursor.state_dict(), exhausted)


class _Attempt:
    """The draws of one batch, numbered from 0."""

    def __init__(self) -> None:
        self.indices: list[int] = []  # the prompt of each draw
        self.running: dict[int, asyncio.Future[Group | None]] = {}
        self.finished: dict[int, Group | None] = {}  # None: failed
        self.kept: list[int] = []  # draws whose group can be trained on, ascending

    async def abort(self, numbers: Iterable[int]) -> None:
        """Cancel draws and wait until they have ended."""
        tasks = [self.running.pop(number) for number in list(numbers)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_mixed(group: Group) -> bool:
    """Whether a group carries a learning signal: by correctness, never by shaped reward."""
    return mixed_groups([float(sample.correct) for sample in group.samples], [group.draw] * len(group.samples))[
        group.draw
    ]
