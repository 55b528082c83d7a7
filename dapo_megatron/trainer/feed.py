"""Rollouts as this rank needs them: the whole batch's header, its own share of the tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from dapo_megatron.config.run import Config
from dapo_megatron.rollout.handle import Rollouts, StopRun
from dapo_megatron.trainer.batching import Batch, load_batch
from dapo_megatron.trainer.policy import Policy

# Kind of work, done, total, text.
ShowProgress = Callable[[str, float, float, str], None]
OnProgress = Callable[[float, float, str], None]


class Feed:
    """Batches for one rank, from the rollout controller or from a recording.

    Waiting never happens inside a collective: an answer of 20,000 tokens takes longer than their timeouts.
    """

    def __init__(self, rollouts: Rollouts, config: Config, policy: Policy, show: ShowProgress) -> None:
        self._rollouts, self._config, self._show = rollouts, config, show
        self._layout, self._packing = policy.layout, policy.packing

    def servers(self) -> Sequence[tuple[str, str]]:
        """Wait until all servers are healthy; their URLs and tokens. Empty for a recording."""
        return self._rollouts.wait_ready(self._progress("start"))

    def next_batch(self, step: int, version: int) -> Batch | StopRun:
        """The batch of `step`, sampled with the weights `version`.

        Rank 0 starts the sampling; every rank waits for the header, computes the same plan and fetches its tokens.

        Returns:
            The batch, or StopRun where the sampling budget is used up and `rollout.on_exhausted` is `stop`.
        """
        if self._layout.rank == 0:
            self._rollouts.begin(step, version)
        header = self._rollouts.wait(step, self._progress("rollout"))
        if isinstance(header, StopRun):
            return header
        return load_batch(header, self._packing, self._layout, lambda responses: self._rollouts.tokens(step, responses))

    def evaluate(self, name: str) -> dict[str, Any] | None:
        """Scores on the held-out prompts: on rank 0, where `evaluation.data` is given and there are servers."""
        if self._layout.rank != 0 or self._config.evaluation.data is None:
            return None
        return self._rollouts.evaluate(name, self._progress("evaluation"))

    def _progress(self, kind: str) -> OnProgress:
        return lambda done, total, text: self._show(kind, done, total, text)
