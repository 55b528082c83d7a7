"""What the controller does once it has servers: batches and evaluations."""

import asyncio
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.config.run import Config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts, load_rows, tokenize
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.evaluation.evaluate import evaluate
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rewards import RewardFunction
from dapo_megatron.rollout.blocks import BatchTokens, build_batch
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.rollout.report import GroupReport, cost_stats
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.sampler import Progress, Sampler
from dapo_megatron.rollout.service import BudgetExhaustedError
from dapo_megatron.types import BatchHeader

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Prompts and the order in which they are drawn."""

    train: Prompts
    held_out: Prompts | None
    cursor: PromptCursor


def load_data(config: Config, tokenizer: Tokenizer, state: dict[str, Any] | None) -> Data:
    """Load and tokenise all prompts; the cursor continues from `state`.

    Raises:
        UserError: when a data set cannot be used, or the training prompts are not those of the saved state.
    """
    limit = config.data.max_prompt_tokens
    train = tokenize(load_rows(config.data.train), tokenizer, limit)
    held_out = tokenize(load_rows(config.evaluation.data), tokenizer, limit) if config.evaluation.data else None
    for name, data in (("training", train), ("held-out", held_out)):
        if data is not None:
            counts = len(data.prompts), data.duplicates, data.too_long
            logger.info("%s prompts: %d; skipped: %d duplicates, %d too long", name, *counts)
    order = config.run.seed, config.data.shuffle
    cursor = PromptCursor(len(train.prompts), *order, train.fingerprint, config.rollout.history)
    if state:
        cursor.load_state_dict(state)
    return Data(train, held_out, cursor)


class RolloutWork:
    """Batches and evaluations over healthy servers, with twice as many answers in flight as servers can run."""

    def __init__(
        self, config: Config, data: Data, tokenizer: Tokenizer, fleet: Fleet, function: RewardFunction | None = None
    ):
        rollout, evaluation = config.rollout, config.evaluation
        self._config = config
        self._data = data
        self._architecture = architecture_of(config.model.path)
        self._journal = Journal(Path(config.run.dir) / "rollouts")
        self._report = GroupReport(self._journal.folder, tokenizer.decode)
        self._answers_in_flight = 2 * config.fleet.servers * config.fleet.max_num_seqs
        rules = tokenizer, config.data.reward, rollout.stop, config.algorithm.overlong, rollout.max_tokens
        self._grader = Grader(*rules, function)
        ends = tokenizer.end_token_ids(rollout.stop)
        training = Sampling(config.generation_limit, rollout.temperature, rollout.top_p, ends)
        held_out_sampling = Sampling(config.generation_limit, evaluation.temperature, evaluation.top_p, ends)
        self._sampler = Sampler(
            data.train.prompts,
            data.cursor,
            rollout,
            GroupGenerator(fleet, self._grader, training),
            self._answers_in_flight,
        )
        self._answer_held_out = GroupGenerator(fleet, Grader(*rules), held_out_sampling)

    async def sample(self, step: int, version: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        """Sample, record and return the batch of a step; `version` is that of the weights now in the servers."""
        sampled = await self._sampler.sample_batch(progress)
        self._grader.end_step(step)
        sampled.stats.update(cost_stats(sampled.draws, self._architecture, sampled.stats["seconds"]))
        await asyncio.to_thread(self._report.write, step, sampled.draws)
        if sampled.exhausted and self._config.rollout.on_exhausted == "stop":
            raise BudgetExhaustedError(
                f"step {step}: the whole budget of {sampled.stats['drawn']:.0f} prompts gave {len(sampled.groups)} of "
                f"the {progress.needed} groups needed, and rollout.on_exhausted is stop"
            )
        if sampled.exhausted:
            logger.warning("step %d: the budget ended at %d of %d groups", step, len(sampled.groups), progress.needed)
        header, tokens = build_batch(step, sampled.groups, sampled.stats, sampled.cursor)
        stale = (header.versions != version).any(axis=1)
        header.stats["stale_tokens"] = float(np.sum(header.response_lengths, where=stale))
        header.stats["exhausted"] = float(sampled.exhausted)
        header.stats["prompts_too_long"] = float(self._data.train.too_long)
        await asyncio.to_thread(self._journal.write, header, tokens)
        return header, tokens

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        """Accuracy on the held-out prompts."""
        if self._data.held_out is None:
            raise RuntimeError("an evaluation was asked for, but evaluation.data is not configured")
        samples = self._config.evaluation.samples
        in_flight = math.ceil(self._answers_in_flight / samples)
        return await evaluate(self._data.held_out.prompts, self._answer_held_out, samples, in_flight, progress)
