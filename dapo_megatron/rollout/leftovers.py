"""Answers that a step began and did not need, kept for the step that draws their prompts again."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dapo_megatron.rollout.requests import Generated
from dapo_megatron.types import Int32, Prompt, Sample


@dataclass(frozen=True, eq=False)
class Leftover:
    """What there is of a group: answers that are `finished`, and the beginnings of others, under their places in it."""

    finished: Mapping[int, Sample] = field(default_factory=dict)
    partial: Mapping[int, Generated] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many answers, begun ones included."""
        return len(self.finished) + len(self.partial)

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        finished = sum(len(sample.token_ids) for sample in self.finished.values())
        return finished + sum(len(part.token_ids) for part in self.partial.values())


class Leftovers:
    """Leftovers under the number of their draw. They are lost when the process ends; their prompts are drawn again."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Prompt, int, Leftover]] = {}  # with the prompt and the size of the group
        self._counts: Counter[str] = Counter()

    def keep(self, draw: int, prompt: Prompt, size: int, leftover: Leftover) -> None:
        """Keep what there is of the group of `size` answers to `prompt`."""
        partial = {place: part for place, part in leftover.partial.items() if len(part.token_ids)}
        begun = Leftover(leftover.finished, partial)
        if begun.answers:
            self._kept[draw] = prompt, size, begun

    def take(self, draw: int, prompt: Prompt, size: int, oldest: int) -> Leftover:
        """What there is for this draw, once.

        Answers with a token of weights older than `oldest` are dropped whole. So is everything where the draw is of
        another prompt or size now: the first to finish of a larger group are its short answers.
        """
        if draw not in self._kept:
            return Leftover()
        of_prompt, of_size, leftover = self._kept.pop(draw)
        if (of_prompt.id, of_size) != (prompt.id, size):
            self._counts["leftovers_discarded"] += leftover.answers
            return Leftover()
        fresh = Leftover(
            {place: answer for place, answer in leftover.finished.items() if _is_fresh(answer.versions, oldest)},
            {place: answer for place, answer in leftover.partial.items() if _is_fresh(answer.versions, oldest)},
        )
        self._counts["stale_dropped"] += leftover.answers - fresh.answers
        self._counts["resumed_answers"] += fresh.answers
        self._counts["resumed_tokens"] += fresh.tokens
        return fresh

    def end_step(self) -> dict[str, float]:
        """Metrics since they were asked for last.

        `resumed_answers` were taken over, begun or finished, with `resumed_tokens` tokens; `stale_dropped` answers
        would have become too old, `leftovers_discarded` ones belonged to a group of another prompt or size.
        `leftover_answers` are kept now.
        """
        counts, self._counts = self._counts, Counter()
        names = ("resumed_answers", "resumed_tokens", "stale_dropped", "leftovers_discarded")
        kept = sum(leftover.answers for _, _, leftover in self._kept.values())
        return {**{name: float(counts[name]) for name in names}, "leftover_answers": float(kept)}


def _is_fresh(versions: Int32, oldest: int) -> bool:
    return bool(np.all(versions >= oldest))
