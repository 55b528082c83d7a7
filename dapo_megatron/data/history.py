"""What the groups drawn so far say about each prompt, and about the policy as it is now."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, NamedTuple, get_args

Verdict = Literal["solved", "unsolvable", "mixed"]
"""Of a group: all answers were right; they were equally bad; they differ in score."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

DECAY = 0.75
"""Weight of a step's groups in the running figures, relative to the groups of the step after it."""

PRIOR_ANSWERS = 8.0
"""A prompt's pass rate is estimated as if this many more answers had been seen, right at the running accuracy."""


class Place(NamedTuple):
    """Where a prompt was drawn: the count of draws before it in the run, and the epoch."""

    prompt: int
    draw: int
    epoch: int


@dataclass(frozen=True)
class GroupResult:
    """A complete group: its right answers, all its answers, and its verdict."""

    right: int
    answers: int
    verdict: Verdict


@dataclass
class PromptRecord:
    """All groups of one prompt. `streak` counts the all-right ones since the last that was not."""

    right: int = 0
    answers: int = 0
    drawn: int = 0
    streak: int = 0
    verdict: Verdict = "mixed"
    last_draw: int = 0
    last_epoch: int = 0

    def add(self, place: Place, result: GroupResult) -> None:
        """Count a group."""
        self.right += result.right
        self.answers += result.answers
        self.drawn += 1
        self.streak = self.streak + 1 if result.verdict == "solved" else 0
        self.verdict = result.verdict
        self.last_draw, self.last_epoch = place.draw, place.epoch


@dataclass
class Running:
    """Right answers, answers, mixed groups and groups of the last steps, each step weighing DECAY of the next."""

    right: float = 0.0
    answers: float = 0.0
    mixed: float = 0.0
    groups: float = 0.0


class PromptHistory:
    """A record of every prompt that was drawn, and running figures over all of them. It changes between steps only."""

    def __init__(self) -> None:
        self.records: dict[int, PromptRecord] = {}
        self.running = Running()

    @property
    def accuracy(self) -> float | None:
        """Running share of right answers; None before the first answer."""
        return self.running.right / self.running.answers if self.running.answers else None

    def acceptance(self, mixed: int = 0, groups: int = 0) -> float:
        """Running share of mixed groups, in (0, 1], with `mixed` of `groups` more; 1 while nothing is known."""
        return (1 + self.running.mixed + mixed) / (1 + self.running.groups + groups)

    def pass_rate(self, prompt: int) -> float | None:
        """Share of a prompt's answers that were right, shrunk towards the running accuracy; None: never drawn."""
        record, accuracy = self.records.get(prompt), self.accuracy
        if record is None or accuracy is None:
            return None
        return (record.right + PRIOR_ANSWERS * accuracy) / (record.answers + PRIOR_ANSWERS)

    def add_step(self, places: Sequence[Place], results: Sequence[GroupResult | None]) -> None:
        """Count the groups of a step, in draw order. A failed one (None) says nothing about its prompt."""
        decayed = Running(*(DECAY * value for value in astuple(self.running)))
        for place, result in zip(places, results, strict=True):
            decayed.groups += 1
            if result is None:
                continue
            decayed.right += result.right
            decayed.answers += result.answers
            decayed.mixed += result.verdict == "mixed"
            self.records.setdefault(place.prompt, PromptRecord()).add(place, result)
        self.running = decayed

    def hard_prompts(self) -> list[int]:
        """Prompts whose last group was unsolvable, the one that was not drawn for longest first."""
        hard = [prompt for prompt, record in self.records.items() if record.verdict == "unsolvable"]
        return sorted(hard, key=lambda prompt: self.records[prompt].last_draw)

    def resting(self, epoch: int, rest_after: int, rest_epochs: int) -> frozenset[int]:
        """Prompts whose last `rest_after` groups were all right, until `rest_epochs` epochs after the last of them."""
        return frozenset(
            prompt
            for prompt, record in self.records.items()
            if record.streak >= rest_after and epoch <= record.last_epoch + rest_epochs
        )

    def counts(self) -> dict[str, float]:
        """Metrics: how many prompts had which verdict when they were last drawn."""
        found = Counter(record.verdict for record in self.records.values())
        return {f"history/{verdict}": float(found[verdict]) for verdict in VERDICTS}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state: per prompt drawn a list of numbers, PromptRecord's in their order after the prompt."""
        rows = (
            [prompt, r.right, r.answers, r.drawn, r.streak, VERDICTS.index(r.verdict), r.last_draw, r.last_epoch]
            for prompt, r in self.records.items()
        )
        return {"running": list(astuple(self.running)), "prompts": list(rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by a saved state."""
        self.running = Running(*state["running"])
        self.records = {
            prompt: PromptRecord(right, answers, drawn, streak, VERDICTS[verdict], last_draw, last_epoch)
            for prompt, right, answers, drawn, streak, verdict, last_draw, last_epoch in state["prompts"]
        }
