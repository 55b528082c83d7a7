"""Held-out accuracy, measured through the rollout servers."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

from dapo_megatron.rollout.sampler import Generate, GroupFailedError, GroupRequest, Progress
from dapo_megatron.types import Prompt, Sample


async def evaluate(
    prompts: Sequence[Prompt], generate: Generate, samples: int, max_in_flight: int, progress: Progress
) -> dict[str, Any]:
    """Answer every prompt with a group and return its accuracy.

    Args:
        prompts: the held-out problems.
        generate: answers one prompt.
        samples: answers per prompt.
        max_in_flight: problems worked on at the same time.
        progress: counts problems (`kept` of `needed`), answers and tokens as they finish.

    Returns:
        `scores`: the share of right answers of each problem, in the order of `prompts`; a problem whose answers could
        not be had scores 0 and is counted in `failed`. Over all answers: `accuracy` (mean of the scores), `answers`,
        `response_length` (mean, in tokens), `truncated` (share), `no_answer` (share), `tokens`; `seconds`.

    Raises:
        RuntimeError: when no problem could be answered.
    """
    started = monotonic()
    progress.needed = progress.drawn = len(prompts)
    slots = asyncio.Semaphore(max_in_flight)

    def count(place: int, sample: Sample) -> None:
        progress.add(sample)

    async def answer(prompt: Prompt) -> tuple[Sample, ...]:
        async with slots:
            try:
                return await generate(GroupRequest(-1, prompt, samples, count, lambda place, part: None))
            except GroupFailedError:
                return ()
            finally:
                progress.kept += 1

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(prompt)) for prompt in prompts]
    groups = [task.result() for task in tasks]
    return _summary(groups) | {"seconds": monotonic() - started}


def _summary(groups: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise RuntimeError(f"evaluation: all {len(groups)} problems failed; see the warnings in the controller's log")
    scores = [sum(sample.correct for sample in group) / len(group) if group else 0.0 for group in groups]
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "scores": scores,
        "accuracy": sum(scores) / len(scores),
        "problems": len(groups),
        "failed": sum(not group for group in groups),
        "answers": len(samples),
        "response_length": tokens / len(samples),
        "truncated": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "no_answer": sum(sample.reason == "no_answer" for sample in samples) / len(samples),
        "tokens": tokens,
    }
