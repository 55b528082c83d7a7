"""Dynamic sampling in draw order (arXiv 2503.14476, eq. 11).

Prompts are drawn ahead of what is known, their groups finish in any order, and the batch is the first N mixed groups
in the order of the draws. Which groups are trained on therefore depends neither on speed nor on how many are in
flight: taking what arrives first trains on short answers (`selection: arrival` does, to compare).
"""

import asyncio
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from dapo_megatron.algorithm.group_filter import mixed_groups
from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.history import GroupResult, Verdict
from dapo_megatron.rollout.blocks import version_runs
from dapo_megatron.rollout.forecast import Coverage, Forecast, group_size
from dapo_megatron.rollout.leftovers import Leftover, Leftovers
from dapo_megatron.rollout.records import digest
from dapo_megatron.rollout.requests import Generated
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


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """A group of `size` answers to `prompt`, which is draw number `draw` of the run (-1: of an evaluation).

    An answer goes by its place in the group, 0 .. size-1, which it keeps from one attempt to the next. `finished` and
    `partial` are those of an earlier attempt: to count as they are, and to go on with. `on_answer` is called for every
    answer that this attempt finishes. Where the attempt is cancelled, `on_partial` is called once for every other
    answer that has begun, in an earlier attempt or in this one, before the cancellation comes through.
    """

    draw: int
    prompt: Prompt
    size: int
    on_answer: Callable[[int, Sample], None]
    on_partial: Callable[[int, Generated], None]
    finished: Mapping[int, Sample] = field(default_factory=dict)
    partial: Mapping[int, Generated] = field(default_factory=dict)


Generate = Callable[[GroupRequest], Awaitable[tuple[Sample, ...]]]
"""Returns the whole group in the order of its places. Raises GroupFailedError; may be cancelled."""


@dataclass(frozen=True)
class SampledBatch:
    """Groups to train on, in draw order; the rollout's metrics; the cursor's state right after the step's draws.

    `draws` are all draws of the step with what became of them. `exhausted`: the budget was used up before there were
    N groups.
    """

    groups: tuple[Group, ...]
    draws: tuple[Draw, ...]
    stats: dict[str, float]
    cursor: dict[str, Any]
    exhausted: bool


class Record(Protocol):
    """Writes down that something happened."""

    def __call__(self, kind: str, **members: Any) -> None:
        """As `Records.add`."""
        ...


def forget(kind: str, **members: Any) -> None:
    """A Record that writes nothing."""


class Sampler:
    """Samples one batch after the other. `max_answers` says how many answers may be generated at the same time (None:
    no bound); they are rounded up to whole groups.

    It changes how fast a batch is there, never which groups are in it (but for `selection: arrival`).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        cursor: PromptCursor,
        config: RolloutConfig,
        generate: Generate,
        max_answers: Callable[[], int] | None = None,
    ):
        self._prompts = prompts
        self._cursor = cursor
        self._config = config
        self._generate = generate
        self._max_answers = max_answers
        self._leftovers = Leftovers()

    async def sample_batch(self, progress: Progress, oldest: int = 0, record: Record = forget) -> SampledBatch:
        """Sample until N groups are certain or the budget is used up (`wait_next` renews it).

        Answers that earlier steps left count if their weights are of version `oldest` or later. `record` is told of
        every draw, answer and outcome. Whatever happens, no generation is left running; when it fails or is cancelled,
        the cursor stands where it was.
        """
        started = monotonic()
        progress.needed = self._config.prompts_per_step
        attempt = _Attempt(group_size(self._config, self._cursor.history.accuracy), oldest, progress, record)
        try:
            await self._run(attempt)
        except BaseException:
            try:
                await attempt.abort(attempt.running)
            finally:
                self._cursor.requeue(attempt.candidates)
            raise
        return self._finish(attempt, started)

    async def _run(self, attempt: "_Attempt") -> None:
        budget, progress = self._config.prompt_budget, attempt.progress
        while True:
            if len(attempt.kept) >= progress.needed:
                await attempt.abort(self._needless(attempt))
            self._draw_ahead(attempt, budget)
            progress.kept, progress.drawn = min(len(attempt.kept), progress.needed), len(attempt.candidates)
            if attempt.running:
                await asyncio.wait(attempt.running.values(), return_when=asyncio.FIRST_COMPLETED)
                self._collect(attempt)
            elif (
                budget is not None and len(attempt.kept) < progress.needed and self._config.on_exhausted == "wait_next"
            ):
                budget += self._config.prompt_budget or 0
            else:
                return

    def _needless(self, attempt: "_Attempt") -> list[int]:
        """Draws under way that cannot be in the batch any more; in draw order, those before its last still can."""
        if self._config.selection == "arrival":
            return list(attempt.running)
        last = attempt.kept[attempt.progress.needed - 1]
        return [number for number in attempt.running if number > last]

    def _draw_ahead(self, attempt: "_Attempt", budget: int | None) -> None:
        """Have as many groups in flight as the groups still needed will probably take."""
        missing = attempt.progress.needed - len(attempt.kept)
        if missing <= 0:
            return
        forecast = self._forecast(attempt.size, attempt.mixed, len(attempt.finished))
        coverage = Coverage()
        for number in attempt.running:
            coverage.add(forecast(attempt.candidates[number].index))
        left = math.inf if budget is None else budget - len(attempt.candidates)
        groups = math.inf if self._max_answers is None else math.ceil(self._max_answers() / attempt.size)
        slots = min(left, groups - len(attempt.running))
        while slots > 0 and not coverage.reaches(missing):
            slots -= 1
            coverage.add(forecast(self._draw(attempt)))

    def _forecast(self, size: int, mixed: int = 0, groups: int = 0) -> Forecast:
        return Forecast(self._cursor.history, size, self._config.dynamic_sampling, mixed, groups)

    def _draw(self, attempt: "_Attempt") -> int:
        """Draw a prompt and begin its group. Returns the prompt's index."""
        index = self._cursor.draw()
        number, prompt = self._cursor.number, self._prompts[index]
        attempt.record("draw", draw=number, prompt=prompt.id)
        leftover = self._leftovers.take(number, prompt, attempt.size, attempt.oldest)
        attempt.candidates[number] = _Candidate(number, index, prompt, leftover)
        for place, sample in leftover.finished.items():
            attempt.add_answer(number, place, sample, carried=True)
        attempt.running[number] = asyncio.ensure_future(self._sample_group(attempt, attempt.candidates[number]))
        return index

    async def _sample_group(self, attempt: "_Attempt", candidate: "_Candidate") -> Group | None:
        """The complete group, or None when it failed."""
        number, prompt, finished = candidate.number, candidate.prompt, candidate.leftover.finished
        if len(finished) == attempt.size:
            return Group(number, prompt, tuple(finished[place] for place in range(attempt.size)))
        request = GroupRequest(
            draw=number,
            prompt=prompt,
            size=attempt.size,
            on_answer=lambda place, sample: attempt.add_answer(number, place, sample, carried=False),
            on_partial=candidate.partial.__setitem__,
            finished=finished,
            partial=candidate.leftover.partial,
        )
        try:
            return Group(number, prompt, await self._generate(request))
        except GroupFailedError:
            return None

    def _collect(self, attempt: "_Attempt") -> None:
        for number in [number for number, task in attempt.running.items() if task.done()]:
            candidate = attempt.candidates[number]
            candidate.group = attempt.running.pop(number).result()
            attempt.finished.append(number)
            if candidate.group is None or (self._config.dynamic_sampling and not is_mixed(candidate.group)):
                continue
            attempt.mixed += 1
            if self._config.selection == "arrival":
                attempt.kept.append(number)
            else:
                insort(attempt.kept, number)

    def _finish(self, attempt: "_Attempt", started: float) -> SampledBatch:
        kept = attempt.kept[: attempt.progress.needed]
        exhausted = len(kept) < attempt.progress.needed
        taken = self._taken(attempt, None if exhausted else kept[-1])
        put_back = [candidate for number, candidate in attempt.candidates.items() if number not in taken]
        self._put_back(attempt, put_back)
        candidates = [attempt.candidates[number] for number in sorted(taken)]
        forecast = self._forecast(attempt.size)
        draws = attempt.draws(set(kept), taken)
        stats = batch_stats(draws, self._stopped(put_back)) | {
            "acceptance_forecast": sum(forecast(candidate.index) for candidate in candidates) / len(candidates),
            "group_size": float(attempt.size),
        }
        stats |= self._cursor.finish_step([_result(candidate.group) for candidate in candidates])
        stats |= self._leftovers.end_step()
        stats["seconds"] = monotonic() - started
        groups = tuple(group for number in sorted(kept) if (group := attempt.candidates[number].group) is not None)
        return SampledBatch(groups, draws, stats, self._cursor.state_dict(), exhausted)

    def _taken(self, attempt: "_Attempt", last: int | None) -> set[int]:
        """The draws that count: all up to the `last` that is kept; None: all."""
        if last is None:
            return set(attempt.candidates)
        if self._config.selection == "arrival":
            return set(attempt.finished[: attempt.finished.index(last) + 1])
        return {number for number in attempt.candidates if number <= last}

    def _stopped(self, candidates: Iterable["_Candidate"]) -> list[int]:
        """Tokens of answers that were stopped because others were faster."""
        if self._config.selection == "draw_order":
            return []
        lengths: list[int] = []
        for candidate in candidates:
            lengths += [len(sample.token_ids) for sample in candidate.answers.values()]
            lengths += [len(part.token_ids) for part in candidate.partial.values()]
        return lengths

    def _put_back(self, attempt: "_Attempt", candidates: Collection["_Candidate"]) -> None:
        self._cursor.requeue([candidate.number for candidate in candidates])
        if self._config.partial_rollouts == "requeue":
            return
        for candidate in candidates:
            # Of a failed group the answers that finished are the short ones: to keep them would prefer these.
            if candidate.number not in attempt.finished or candidate.group is not None:
                leftover = Leftover(candidate.answers, candidate.partial)
                self._leftovers.keep(candidate.number, candidate.prompt, attempt.size, leftover)


@dataclass(eq=False)
class _Candidate:
    """A draw of the step and its group; `index` is the prompt's place in the data."""

    number: int
    index: int
    prompt: Prompt
    leftover: Leftover
    # Under their places in the group: those that are finished, the leftover's first; what a stopped group has of more.
    answers: dict[int, Sample] = field(default_factory=dict)
    partial: dict[int, Generated] = field(default_factory=dict)
    group: Group | None = None  # complete


class _Attempt:
    """The draws of one batch under their numbers, ascending, each with a group of `size` answers."""

    def __init__(self, size: int, oldest: int, progress: Progress, record: Record) -> None:
        self.size = size
        self.oldest = oldest
        self.progress = progress
        self.record = record
        self.candidates: dict[int, _Candidate] = {}
        self.running: dict[int, asyncio.Future[Group | None]] = {}
        self.finished: list[int] = []  # as they finish, failed ones too
        self.mixed = 0  # of the finished ones, how many can be trained on
        self.kept: list[int] = []  # those, in the order in which they are chosen from

    def add_answer(self, number: int, place: int, sample: Sample, carried: bool) -> None:
        """Count a finished answer of a draw; a `carried` one was counted in the step that finished it."""
        versions, lengths = version_runs(sample.versions)
        self.record(
            "answer",
            draw=number,
            index=place,
            tokens=len(sample.token_ids),
            versions=list(zip(versions.tolist(), lengths.tolist(), strict=True)),
            digest=digest(sample.token_ids),
            finish_reason=sample.finish_reason,
            carried=carried,
        )
        self.candidates[number].answers[place] = sample
        if not carried:
            self.progress.add(sample)

    async def abort(self, numbers: Iterable[int]) -> None:
        """Cancel draws and wait until they have ended. Raises what one of them raised but for that."""
        tasks = [self.running.pop(number) for number in list(numbers)]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    def draws(self, kept: set[int], taken: set[int]) -> tuple[Draw, ...]:
        """All draws, each with what became of it; recorded."""
        draws = []
        for number, candidate in self.candidates.items():
            outcome = self._outcome(candidate, kept, taken)
            self.record("outcome", draw=number, outcome=outcome)
            carried = len(candidate.leftover.finished)
            draws.append(Draw(number, candidate.prompt, outcome, tuple(candidate.answers.values()), carried))
        return tuple(draws)

    def _outcome(self, candidate: _Candidate, kept: set[int], taken: set[int]) -> Outcome:
        if candidate.number not in taken:
            return "surplus" if candidate.number in self.finished else "aborted"
        if candidate.group is None:
            return "failed"
        if candidate.number in kept:
            return "kept"
        return "all_right" if _verdict(candidate.group) == "solved" else "all_wrong"


def is_mixed(group: Group) -> bool:
    """Whether a group carries a learning signal: by score (correctness, by rule), never by shaped reward."""
    scores = [sample.score for sample in group.samples]
    return mixed_groups(scores, [group.draw] * len(scores))[group.draw]


def _verdict(group: Group) -> Verdict:
    if is_mixed(group):
        return "mixed"
    return "solved" if all(sample.correct for sample in group.samples) else "unsolvable"


def _result(group: Group | None) -> GroupResult | None:
    if group is None:
        return None
    return GroupResult(sum(sample.correct for sample in group.samples), len(group.samples), _verdict(group))
