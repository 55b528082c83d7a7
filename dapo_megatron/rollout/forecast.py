"""What share of groups will be mixed: how many to have in flight, and how large they must be.

A group of G answers of which each is right with probability p is mixed with probability 1 - p^G - (1 - p)^G. None of
this changes which groups are trained on, given their size.
"""

import math
from dataclasses import dataclass

from dapo_megatron.config.rollout import RolloutConfig
from dapo_megatron.data.history import PromptHistory

LEAST_ACCEPTANCE = 1 / 1024
"""No prompt is written off: in-flight groups would have no bound."""


def expected_acceptance(pass_rate: float, size: int) -> float:
    """Probability that `size` answers, each right with probability `pass_rate`, are neither all right nor all wrong."""
    return 1.0 - pass_rate**size - (1.0 - pass_rate) ** size


def group_size(config: RolloutConfig, accuracy: float | None) -> int:
    """Answers per prompt in a step that begins at this running accuracy (None: not known yet).

    With `adaptive_group`, the smallest size that reaches the acceptance asked for, else the largest.
    """
    rule = config.adaptive_group
    if rule is None or accuracy is None:
        return config.samples_per_prompt
    enough = (size for size in rule.sizes if expected_acceptance(accuracy, size) >= rule.acceptance)
    return next(enough, config.samples_per_prompt)


@dataclass(frozen=True)
class Forecast:
    """Probability that a prompt's group of `size` answers can be trained on.

    A prompt with a history has the acceptance expected at its own pass rate, any other the running acceptance, which
    `mixed` of `groups` groups finished in this step already add to. Without `filtered` (dynamic sampling) every
    group is trained on.
    """

    history: PromptHistory
    size: int
    filtered: bool
    mixed: int = 0
    groups: int = 0

    def __call__(self, prompt: int) -> float:
        """The forecast for a prompt, in (0, 1]."""
        if not self.filtered:
            return 1.0
        pass_rate = self.history.pass_rate(prompt)
        if pass_rate is None:
            return max(LEAST_ACCEPTANCE, self.history.acceptance(self.mixed, self.groups))
        return max(LEAST_ACCEPTANCE, expected_acceptance(pass_rate, self.size))


@dataclass
class Coverage:
    """How many mixed groups those in flight will give: `mean` and `variance` of a sum of independent draws."""

    mean: float = 0.0
    variance: float = 0.0

    def add(self, acceptance: float) -> None:
        """One more group in flight."""
        self.mean += acceptance
        self.variance += acceptance * (1.0 - acceptance)

    def reaches(self, needed: int) -> bool:
        """Whether one standard deviation less than the mean is enough, so that one more round is rarely needed."""
        return self.mean - math.sqrt(self.variance) >= needed
