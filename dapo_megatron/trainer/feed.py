"""Rollouts as this rank needs them: the whole batch's header, its own share of the tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

from dapo_megatron.config.run import Config
from dapo_megatron.rollout.handle import Rollouts, StopRun
from dapo_megatron.rollout.jobs import Admission
from dapo_megatron.trainer.batching import Batch, load_batch
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.staleness import with_staleness

# Kind of work, done, total, text.
ShowProgress = Callable[[str, float, float, str], None]
# Gives servers that come back the current weights, whose version is the second argument.
Admit = Callable[[Admission, int], None]


class Feed:
    """Batches for one rank, from the rollout controller or from a recording.

    Waiting never happens inside a collective: an answer of 20,000 tokens takes longer than their timeouts. Servers that
    come back meanwhile get the current weights, at the same place on every rank.
    """

    def __init__(self, rollouts: Rollouts, admit: Admit, config: Config, policy: Policy, show: ShowProgress) -> None:
        self._rollouts, self._admit, self._config, self._show = rollouts, admit, config, show
        self._layout, self._packing = policy.layout, policy.packing
        self._begun = 0  # last step whose sampling was started

    def next_batch(self, step: int, version: int) -> Batch | StopRun:
        """The batch of `step`, for the weights `version`, which are those of policy and servers.

        Rank 0 starts the sampling, of later steps too where the pipeline looks ahead; every rank waits for the header,
        computes the same plan and fetches its tokens.

        Returns:
            The batch, or StopRun where the sampling budget is used up and `rollout.on_exhausted` is `stop`.

        Raises:
            RuntimeError: for a token whose weights are older than `rollout.max_staleness` allows.
        """
        self._begin(step, version)
        header = self._rollouts.wait(step, partial(self._show, "rollout"), self._admit_to(version))
        if isinstance(header, StopRun):
            return header
        if self._config.has_servers:
            limit = self._config.algorithm.rollout_correction.max_token_staleness
            header = with_staleness(header, version, self._config.rollout.staleness_bound, limit)
        return load_batch(header, self._packing, self._layout, lambda responses: self._rollouts.tokens(step, responses))

    def evaluate(self, name: str, version: int) -> dict[str, Any] | None:
        """Scores on the held-out prompts under the weights `version`; None without `evaluation.data` or servers."""
        if self._config.evaluation.data is None:
            return None
        return self._rollouts.evaluate(name, partial(self._show, "evaluation"), self._admit_to(version))

    def _begin(self, step: int, version: int) -> None:
        """Start the sampling of `step` and those ahead of it, each once. Every step between makes a version."""
        last = min(step + self._config.rollout.steps_ahead, self._config.run.steps)
        for later in range(max(step, self._begun + 1), last + 1):
            if self._layout.rank == 0:
                self._rollouts.begin(later, version, version + later - step)
            self._begun = later

    def _admit_to(self, version: int) -> Callable[[Admission], None]:
        return lambda admission: self._admit(admission, version)
