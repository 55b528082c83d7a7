"""From a prompt to its group of graded answers."""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Sequence

from dapo_megatron.rollout.fleet import Answer, AnswerGroup, Fleet
from dapo_megatron.rollout.requests import NOTHING, RequestError, Sampling
from dapo_megatron.rollout.sampler import GroupFailedError, GroupRequest
from dapo_megatron.types import Sample

logger = logging.getLogger(__name__)


class GroupGenerator:
    """Generates groups of answers with `sampling`; `by_rule`: graded by the rule alone.

    A group that is not complete after `watchdog_after` seconds is named in the log, and again after as many more.
    `resume`: a group that is cancelled first collects what has arrived of its answers, for `GroupRequest.on_partial`.
    """

    def __init__(
        self, fleet: Fleet, sampling: Sampling, watchdog_after: float, *, by_rule: bool = False, resume: bool = False
    ) -> None:
        self._fleet = fleet
        self._sampling = sampling
        self._watchdog_after = watchdog_after
        self._by_rule = by_rule
        self._resume = resume
        self._run = uuid.uuid4().hex[:12]  # request ids must differ from those of an earlier controller
        self._numbers = itertools.count()

    async def __call__(self, request: GroupRequest) -> tuple[Sample, ...]:
        """The answers that `request` asks for: those that are finished first.

        Raises:
            GroupFailedError: when one of them failed for good. The others are cancelled then.
            VersionError: see `Fleet.answer`; also where the group is cancelled, or fails for another reason.
        """
        answers = self._answers(request)
        tasks = {answer: asyncio.create_task(self._fleet.answer(answer)) for answer in answers}
        reported: set[Answer] = set()
        watchdog = asyncio.create_task(self._watch(request, tasks))
        try:
            await self._collect(request, tasks, reported)
        except RequestError as error:
            raise GroupFailedError(str(error)) from error
        except asyncio.CancelledError:
            if self._resume:
                await self._put_aside(request, tasks, reported)
            raise
        finally:
            await _end([watchdog, *tasks.values()])
        samples = {**request.finished, **{answer.index: task.result() for answer, task in tasks.items()}}
        return tuple(samples[index] for index in range(request.size))

    def _answers(self, request: GroupRequest) -> list[Answer]:
        """Those still to be finished."""
        group = AnswerGroup(request.draw, request.prompt, request.size, self._sampling, self._by_rule)
        name = f"{self._run}-{next(self._numbers)}"
        missing = [index for index in range(request.size) if index not in request.finished]
        return [Answer(group, index, f"{name}-{index}", request.partial.get(index, NOTHING)) for index in missing]

    async def _collect(
        self, request: GroupRequest, tasks: dict[Answer, asyncio.Task[Sample]], reported: set[Answer]
    ) -> None:
        """Report answers as they finish. Raises what the first one that fails raises."""
        waiting = {task: answer for answer, task in tasks.items()}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = waiting.pop(task)
                request.on_answer(answer.index, task.result())
                reported.add(answer)

    async def _put_aside(
        self, request: GroupRequest, tasks: dict[Answer, asyncio.Task[Sample]], reported: set[Answer]
    ) -> None:
        """End the answers that are under way and hand over what they have."""
        await self._fleet.stop(tasks)
        running = [task for answer, task in tasks.items() if answer.attempt is not None]
        if running:
            await asyncio.wait(running)  # what has been graded meanwhile is whole
        await _end(list(tasks.values()))
        for answer, task in tasks.items():
            if answer in reported:
                continue
            if not task.cancelled() and task.exception() is None:
                request.on_answer(answer.index, task.result())
            elif len(answer.so_far.token_ids):
                request.on_partial(answer.index, answer.so_far)

    async def _watch(self, request: GroupRequest, tasks: dict[Answer, asyncio.Task[Sample]]) -> None:
        age = 0.0
        while True:
            await asyncio.sleep(self._watchdog_after)
            age += self._watchdog_after
            open_answers = [_described(answer) for answer, task in tasks.items() if not task.done()]
            logger.warning(
                "prompt %d (draw %d) is not complete after %.0f s, %d of %d answers are missing: %s",
                request.prompt.id,
                request.draw,
                age,
                len(open_answers),
                request.size,
                "; ".join(open_answers),
            )


def _described(answer: Answer) -> str:
    if answer.attempt is None:
        return f"{answer.index} waits for a server with {answer.tokens} tokens"
    return f"{answer.index} on server {answer.server} with {answer.tokens} tokens"


async def _end(tasks: Sequence[asyncio.Task[Sample] | asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for them. Raises what one raised that is no failed answer: it must end the run."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError | RequestError):
            raise result
