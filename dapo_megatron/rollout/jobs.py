"""Batches and evaluations under way, and what every trainer rank learns of each, in the same order on all of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from dapo_megatron.rollout.blocks import BatchTokens
from dapo_megatron.rollout.requests import Server
from dapo_megatron.rollout.sampler import Progress
from dapo_megatron.types import BatchHeader

T = TypeVar("T")


class BudgetExhaustedError(Exception):
    """The prompt budget is used up and the run is configured to end then; the text says so."""


class Work(Protocol):
    """What the controller does once it has servers."""

    async def sample(self, step: int, version: int, oldest: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        """The batch of a step, whose tokens are of the weights `oldest` or newer. Raises BudgetExhaustedError."""
        ...

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        """The result of an evaluation, JSON-able."""
        ...


@dataclass(frozen=True)
class Admission:
    """Servers that have no usable weights yet, and wait for the trainer to bring them. `number` counts from 0."""

    number: int
    servers: tuple[Server, ...]


@dataclass
class Job(Generic[T]):
    """Something under way, and what it was asked for with.

    `admissions` come to all ranks in this order, before the result; none is added once there is a result.
    """

    task: "asyncio.Task[T]"
    progress: Progress
    versions: tuple[int, int] = (0, 0)  # of the servers, and of the policy that will be trained
    admissions: list[Admission] = field(default_factory=list)


class Batches:
    """The batches of steps, sampled one after the other in the order in which they were begun."""

    def __init__(self, work: Work, max_staleness: int, on_failure: Callable[[BaseException], None]) -> None:
        self.jobs: dict[int, Job[tuple[BatchHeader, BatchTokens]]] = {}
        self._work, self._max_staleness, self._on_failure = work, max_staleness, on_failure

    def begin(self, step: int, version: int, trained_version: int) -> None:
        """Queue the sampling of a step. Doing it twice does no harm.

        Raises:
            ValueError: if it was begun with other versions, or is not the step after the last one.
        """
        if (running := self.jobs.get(step)) is not None:
            if running.versions != (version, trained_version):
                raise ValueError(f"the batch of step {step} was begun with versions {running.versions}")
            return
        last = max(self.jobs, default=step - 1)
        if step != last + 1:
            raise ValueError(f"the batch of step {step} cannot follow that of step {last}")
        before = self.jobs[last].task if self.jobs else None
        progress = Progress()
        task = asyncio.create_task(self._sample(before, step, version, trained_version, progress))
        self.jobs[step] = Job(task, progress, (version, trained_version))

    def forget_before(self, step: int) -> None:
        """Drop the batches before the last one that had responses and is of an earlier step.

        All ranks trained on that one together. A batch without responses is passed over by each rank on its own.
        """
        before = [(number, job.task.result()[0]) for number, job in self.jobs.items() if number < step]
        last = max((number for number, header in before if header.num_responses), default=0)
        for old in [number for number in self.jobs if number < last]:
            del self.jobs[old]

    async def settled(self, go_on: Callable[[], bool], poll: float) -> None:
        """Wait until all that was begun is complete, or `go_on`, asked every `poll` seconds, says no."""
        while (running := [job.task for job in self.jobs.values() if not job.task.done()]) and go_on():
            await asyncio.wait(running, timeout=poll)

    async def _sample(
        self,
        before: "asyncio.Task[tuple[BatchHeader, BatchTokens]] | None",
        step: int,
        version: int,
        trained_version: int,
        progress: Progress,
    ) -> tuple[BatchHeader, BatchTokens]:
        if before is not None:
            await asyncio.wait([before])
            before.result()  # a run that ends with one step samples no later one
        try:
            return await self._work.sample(step, version, trained_version - self._max_staleness, progress)
        except BudgetExhaustedError:
            raise
        except Exception as error:  # at once, though the trainer may ask for it much later
            self._on_failure(error)
            raise


class Admissions:
    """Hands joining servers to the ranks through the job that these wait for, one admission at a time."""

    def __init__(self, joining: Callable[[], Sequence[Server]]) -> None:
        self._joining = joining
        self._number = 0
        self.open: Admission | None = None

    def offer(self, job: Job[Any]) -> None:
        """Add the servers that join now, if there are any, to a job that a rank waits for."""
        if self.open is None and not job.task.done() and (servers := tuple(self._joining())):
            self.open = Admission(self._number, servers)
            self._number += 1
            job.admissions.append(self.open)

    def close(self, number: int) -> Admission | None:
        """The trainer has dealt with an admission: it is returned, or None where it is not the open one."""
        done = self.open
        if done is None or done.number != number:
            return None
        self.open = None
        return done
