"""From a prompt to its group of graded answers."""

import asyncio
import itertools
import uuid
from collections.abc import Callable

from dapo_megatron.rollout.client import RequestError
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.sampler import GroupFailedError
from dapo_megatron.types import Prompt, Sample


class GroupGenerator:
    """Generates groups of answers with `sampling`. Answers are graded as they finish, outside the event loop."""

    def __init__(self, fleet: Fleet, grader: Grader, sampling: Sampling):
        self._fleet = fleet
        self._grader = grader
        self._sampling = sampling
        self._run = uuid.uuid4().hex[:12]  # request ids must differ from those of an earlier controller
        self._numbers = itertools.count()

    async def __call__(self, prompt: Prompt, size: int, on_answer: Callable[[Sample], None]) -> tuple[Sample, ...]:
        """`size` answers to `prompt`.

        Raises:
            GroupFailedError: when one of them failed for good. The others are cancelled then.
        """
        name = f"{self._run}-{next(self._numbers)}"
        with self._fleet.place(size) as server:
            tasks = [asyncio.create_task(self._answer(prompt, f"{name}-{i}", server)) for i in range(size)]
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
        return await asyncio.to_thread(self._grader.sample, reply, prompt)
