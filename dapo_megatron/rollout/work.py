"""What the controller does once it has servers: batches and evaluations."""

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any

from dapo_megatron.config.run import Config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.prompts import Prompts, load_rows, tokenize
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.evaluation.evaluate import evaluate
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rollout.blocks import BatchTokens, build_batch
from dapo_megatron.rollout.fleet import Fleet
from dapo_megatron.rollout.generation import GroupGenerator
from dapo_megatron.rollout.jobs import BudgetExhaustedError
from dapo_megatron.rollout.journal import Journal
from dapo_megatron.rollout.records import Records, digest
from dapo_megatron.rollout.report import GroupReport, cost_stats
from dapo_megatron.rollout.requests import Engine, Sampling
from dapo_megatron.rollout.sampler import Progress, SampledBatch, Sampler
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
    """Batches and evaluations over a fleet, with twice as many answers in flight as its servers can run.

    `engine` is what the fleet's answers run on; `records` are told of every draw, answer and outcome.
    """

    def __init__(
        self, config: Config, data: Data, tokenizer: Tokenizer, fleet: Fleet, engine: Engine, records: Records
    ) -> None:
        rollout, evaluation = config.rollout, config.evaluation
        self._config = config
        self._data = data
        self._fleet = fleet
        self._engine = engine
        self._records = records
        self._architecture = architecture_of(config.model.path)
        self._journal = Journal(records.path.parent)
        self._report = GroupReport(self._journal.folder, tokenizer.decode)
        ends = tokenizer.end_token_ids(rollout.stop)
        training = Sampling(config.generation_limit, rollout.temperature, rollout.top_p, ends)
        held_out = Sampling(config.generation_limit, evaluation.temperature, evaluation.top_p, ends)
        # How far answers came that are stopped is of use to resume them, and to tell what `arrival` prefers.
        resume = rollout.partial_rollouts == "resume" or rollout.selection == "arrival"
        generate = GroupGenerator(fleet, training, rollout.watchdog_after, resume=resume)
        self._sampler = Sampler(data.train.prompts, data.cursor, rollout, generate, self._answers_in_flight)
        self._answer_held_out = GroupGenerator(fleet, held_out, rollout.watchdog_after, by_rule=True)

    def _answers_in_flight(self) -> int:
        return 2 * max(1, len(self._fleet.members())) * self._config.fleet.max_num_seqs

    async def sample(self, step: int, version: int, oldest: int, progress: Progress) -> tuple[BatchHeader, BatchTokens]:
        """Sample, record and return the batch of a step.

        `version` is that of the weights in the servers when it was asked for, `oldest` the least that a token's may be.

        Raises:
            BudgetExhaustedError: when the budget is used up and the run shall end then.
            RuntimeError: when a token is of older weights: the bound is hard.
        """

        def record(kind: str, **members: Any) -> None:
            self._records.add(kind, step=step, **members)

        record("begin", version=version, oldest=oldest)
        sampled = await self._sampler.sample_batch(progress, oldest, record)
        self._engine.end_step(step)
        sampled.stats.update(cost_stats(sampled.draws, self._architecture, sampled.stats["seconds"]))
        await asyncio.to_thread(self._report.write, step, sampled.draws)
        self._check_exhausted(step, sampled, progress)
        header, tokens = build_batch(step, sampled.groups, sampled.stats, sampled.cursor)
        _check_versions(header, oldest)
        header.stats["exhausted"] = float(sampled.exhausted)
        header.stats["prompts_too_long"] = float(self._data.train.too_long)
        await asyncio.to_thread(self._journal.write, header, tokens)
        record("batch", responses=header.num_responses, digest=digest(tokens.response_tokens))
        return header, tokens

    def _check_exhausted(self, step: int, sampled: SampledBatch, progress: Progress) -> None:
        if not sampled.exhausted:
            return
        if self._config.rollout.on_exhausted == "stop":
            raise BudgetExhaustedError(
                f"step {step}: the whole budget of {sampled.stats['drawn']:.0f} prompts gave {len(sampled.groups)} of "
                f"the {progress.needed} groups needed, and rollout.on_exhausted is stop"
            )
        logger.warning("step %d: the budget ended at %d of %d groups", step, len(sampled.groups), progress.needed)

    async def evaluate(self, progress: Progress) -> dict[str, Any]:
        """Accuracy on the held-out prompts."""
        if self._data.held_out is None:
            raise RuntimeError("an evaluation was asked for, but evaluation.data is not configured")
        samples = self._config.evaluation.samples
        in_flight = math.ceil(self._answers_in_flight() / samples)
        return await evaluate(self._data.held_out.prompts, self._answer_held_out, samples, in_flight, progress)


def _check_versions(header: BatchHeader, oldest: int) -> None:
    if not (stale := header.run_versions < oldest).any():
        return
    response, version = header.run_responses[stale][0], header.run_versions[stale][0]
    raise RuntimeError(
        f"step {header.step}: the answer {response} (draw {header.draws[header.groups[response]]}) has tokens of "
        f"version {version}, but rollout.max_staleness allows none older than {oldest}"
    )
