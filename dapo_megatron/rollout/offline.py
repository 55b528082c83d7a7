"""Given pairs of answers in place of generated ones: rollouts without a process and without servers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from dapo_megatron.config.run import Config
from dapo_megatron.data.cursor import PromptCursor
from dapo_megatron.data.preferences import Pair, Pairs, load_pairs, tokenize_pairs, told
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError
from dapo_megatron.rollout.blocks import BatchTokens, build_batch, select
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.rollout.requests import Server
from dapo_megatron.types import BatchHeader, Group, Int32, Prompt, Sample, TokenBlock

OnProgress = Callable[[float, float, str], None]
OnAdmission = Callable[[Admission], None]
logger = logging.getLogger(__name__)


def read_pairs(config: Config) -> Pairs:
    """The pairs of `data.train`, tokenised.

    Raises:
        UserError: when they cannot be read or none can be trained on.
    """
    stop = config.rollout.stop
    return tokenize_pairs(
        load_pairs(config.data.train, stop),
        Tokenizer(config.model.path),
        stop,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_answer_tokens=config.rollout.max_tokens,
    )


def open_offline(
    config: Config, saved_cursor: dict[str, Any] | None, on_rank_zero: Callable[[Callable[[], str]], str]
) -> "Offline":
    """The given pairs of a run, on every rank, which all read them; `saved_cursor` is that of a run that is resumed.

    Rank 0 reads first: it tells every rank of an error, and alone downloads a data set of the Hub.

    Raises:
        UserError: for data that cannot be used, that is not the same on all ranks, or not that of the saved run.
    """
    read: list[Pairs] = []

    def read_first() -> str:
        read.append(read_pairs(config))
        if (skipped := read[0].skipped).total():
            logger.warning("%s: %d rows are skipped: %s", read[0].source, skipped.total(), told(skipped))
        return read[0].fingerprint

    fingerprint = on_rank_zero(read_first)
    pairs = read[0] if read else read_pairs(config)
    if pairs.fingerprint != fingerprint:
        raise UserError(f"data.train: {pairs.source} is not the same on all nodes; each rank must read the same rows")
    cursor = PromptCursor(len(pairs.pairs), config.run.seed, config.data.shuffle, fingerprint)
    if saved_cursor:
        cursor.load_state_dict(saved_cursor)
    return Offline(pairs, cursor, config.rollout.prompts_per_step)


class NoServers:
    """What rollouts from given data share: nothing to start, to ask or to end."""

    def wait_ready(self, on_progress: OnProgress) -> None:
        """Nothing to wait for."""

    def begin(self, step: int, version: int, trained_version: int) -> None:
        """Nothing to start."""

    def evaluate(self, name: str, on_progress: OnProgress, on_admission: OnAdmission) -> None:
        """Nothing can be generated."""

    def begin_push(self, push: int, version: int) -> None:
        """Nothing to hold."""

    def servers_for_push(self, push: int, attempt: int) -> Sequence[Server]:
        """No servers."""
        return ()

    def push_failed(self, push: int, attempt: int, id: str, reason: str) -> None:
        """Nothing can fail."""

    def push_done(self, push: int, attempt: int, seconds: float) -> None:
        """Nothing goes on."""

    def admitted(self, number: int, version: int, ids: Sequence[str], failed: Mapping[str, str]) -> None:
        """Nothing joins."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


class Offline(NoServers):
    """Batches of `pairs_per_step` pairs, each a group of two: the better answer (reward 1), then the worse (-1).

    Steps are asked for one after the other. No engine has seen the answers, so that their rollout log-probs are NaN;
    their weight versions are those of the policy that is trained on them.
    """

    def __init__(self, pairs: Pairs, cursor: PromptCursor, pairs_per_step: int):
        self._pairs, self._cursor, self._pairs_per_step = pairs, cursor, pairs_per_step
        self._batch: tuple[BatchHeader, BatchTokens] | None = None

    def wait(self, step: int, on_progress: OnProgress, on_admission: OnAdmission) -> BatchHeader:
        """The header of the step's batch; asking twice does no harm."""
        if self._batch is None or self._batch[0].step != step:
            self._batch = self._next_batch(step)
        return self._batch[0]

    def tokens(self, step: int, responses: Int32) -> TokenBlock:
        """Token data of `responses` of the batch that was last waited for."""
        if self._batch is None or self._batch[0].step != step:
            raise ValueError(f"step {step} is not the one that was last waited for")
        return select(*self._batch, responses)

    def _next_batch(self, step: int) -> tuple[BatchHeader, BatchTokens]:
        first = self._cursor.drawn
        pairs = [self._pairs.pairs[self._cursor.draw()] for _ in range(self._pairs_per_step)]
        self._cursor.finish_step([None] * len(pairs))  # nothing was answered: the history stays empty
        groups = [_group(draw, pair, step - 1) for draw, pair in enumerate(pairs, start=first)]
        return build_batch(step, groups, self._stats(pairs), self._cursor.state_dict())

    def _stats(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Metrics: `drawn` and `kept` pairs; lengths in tokens; `epoch`, the passes over the data so far, with the
        part of the one that is going on; `pairs_skipped`, rows of the data set that are not trained on.
        """
        chosen, rejected = [len(pair.chosen) for pair in pairs], [len(pair.rejected) for pair in pairs]
        return {
            "drawn": float(len(pairs)),
            "kept": float(len(pairs)),
            "response_length": float(np.mean(chosen + rejected)),
            "response_length_max": float(max(chosen + rejected)),
            "chosen_length": float(np.mean(chosen)),
            "rejected_length": float(np.mean(rejected)),
            "epoch": self._cursor.drawn / self._cursor.num_prompts,
            "pairs_skipped": float(self._pairs.skipped.total()),
        }


def _group(draw: int, pair: Pair, version: int) -> Group:
    prompt = Prompt(pair.id, tuple(pair.prompt.tolist()), ground_truth="")
    return Group(
        draw, prompt, (_sample(pair.chosen, version, better=True), _sample(pair.rejected, version, better=False))
    )


def _sample(token_ids: Int32, version: int, *, better: bool) -> Sample:
    return Sample(
        token_ids=token_ids,
        log_probs=np.full(len(token_ids), np.nan, np.float32),
        finish_reason="stop",
        versions=np.full(len(token_ids), version, np.int32),
        correct=better,
        reward=1.0 if better else -1.0,
        score=float(better),
    )
