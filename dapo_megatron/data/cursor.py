"""The order in which prompts are drawn, resumable from a small state."""

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

from dapo_megatron.config.rollout import HistoryConfig
from dapo_megatron.data.history import GroupResult, Place, PromptHistory
from dapo_megatron.errors import UserError


@dataclass(frozen=True)
class _Draw:
    """A draw: `number` counts those of the run, `position` is the cursor's before it, `rested` the prompts it passed
    over."""

    number: int
    prompt: int
    position: int
    rested: int
    hard: bool


class PromptCursor:
    """Draws prompts 0 .. num_prompts-1, epoch after epoch, each epoch in an order of its own.

    The n-th draw of a run is a function of n and the seed. Where `rules` let the history act (prompts that rest, hard
    ones drawn in between), the n-th draw of a step is a function of n and the state at the step's start: the history
    changes only when a step is finished. Putting the last draws back restores what was before them, exactly; others
    that are put back wait, under their numbers, to be drawn before anything new.
    `fingerprint` identifies the data set: a state of other data is refused.
    """

    def __init__(
        self, num_prompts: int, seed: int, shuffle: bool, fingerprint: str = "", rules: HistoryConfig | None = None
    ):
        if num_prompts < 1:
            raise ValueError("a cursor needs at least one prompt")
        self._data = {"num_prompts": num_prompts, "fingerprint": fingerprint}
        self._order = {"seed": seed, "shuffle": shuffle}
        self._rules = rules or HistoryConfig()
        self.num_prompts = num_prompts
        self.drawn = 0
        self.history = PromptHistory()
        self._waiting: deque[_Draw] = deque()  # were put back, ascending; the last draws never are among them
        self._position = 0  # places of the endless order that are behind: draws from it and prompts passed over
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)  # two: giving back may cross an epoch
        self._begin_step()

    def _begin_step(self) -> None:
        self._step: list[_Draw] = []
        self._hard = self.history.hard_prompts() if self._rules.hard_every else []
        self._resting = lru_cache(maxsize=2)(self._find_resting)

    @property
    def number(self) -> int:
        """Number of the last draw of the step in progress, counted over the run, from 0."""
        return self._step[-1].number

    def draw(self) -> int:
        """The next prompt."""
        self._step.append(self._waiting.popleft() if self._waiting else self._new_draw())
        return self._step[-1].prompt

    def _new_draw(self) -> _Draw:
        position = self._position
        prompt = self._next_hard()
        hard = prompt is not None
        if prompt is None:
            prompt = self._next_in_order()
        rested = 0 if hard else self._position - position - 1
        self.drawn += 1
        return _Draw(self.drawn - 1, prompt, position, rested, hard)

    def requeue(self, numbers: Collection[int]) -> None:
        """Put draws of this step back, to be drawn again before anything new, in the same order.

        Raises:
            ValueError: when one of `numbers` is not of this step.
        """
        back = set(numbers)
        if not back <= {draw.number for draw in self._step}:
            raise ValueError(f"only draws of the step in progress can be put back, not all of {sorted(back)}")
        put_back = [draw for draw in self._step if draw.number in back]
        self._step = [draw for draw in self._step if draw.number not in back]
        self._waiting = deque(sorted([*put_back, *self._waiting], key=lambda draw: draw.number))
        while self._waiting and self._waiting[-1].number == self.drawn - 1:
            self._position = self._waiting.pop().position
            self.drawn -= 1

    def finish_step(self, results: Sequence[GroupResult | None]) -> dict[str, float]:
        """Enter the step's groups into the history (None: failed), one for each draw that was not put back.

        Returns:
            Metrics: `rested` (prompts passed over), `hard_draws`, and the counts of `PromptHistory.counts`.
        """
        places = [Place(draw.prompt, draw.number, draw.position // self.num_prompts) for draw in self._step]
        self.history.add_step(places, results)
        rested, hard = sum(draw.rested for draw in self._step), sum(draw.hard for draw in self._step)
        self._begin_step()
        return {"rested": float(rested), "hard_draws": float(hard), **self.history.counts()}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state. It grows with the number of different prompts drawn, not with the draws."""
        own = {"drawn": self.drawn, "position": self._position, "waiting": [list(astuple(d)) for d in self._waiting]}
        return {**own, "history": self.history.state_dict(), **self._data, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. One without a history has had no prompts that rested.

        Raises:
            UserError: when the prompts or their order are no longer those of the saved run; going on would skip
                prompts and repeat others without a word.
        """
        if any(state[key] != value for key, value in self._data.items()):
            raise UserError(
                f"the training data changed since the run was saved ({state['num_prompts']} prompts then, "
                f"{self.num_prompts} now): restore it, or start a new run in another run.dir"
            )
        if any(state[key] != value for key, value in self._order.items()):
            raise UserError("run.seed or data.shuffle changed since the run was saved: a resumed run must keep both")
        self.drawn = state["drawn"]
        self._position = state.get("position", self.drawn)
        self._waiting = deque(_Draw(*draw) for draw in state.get("waiting", []))
        self.history = PromptHistory()
        if "history" in state:
            self.history.load_state_dict(state["history"])
        self._begin_step()

    def _next_hard(self) -> int | None:
        """The hard prompt whose turn it is, if it is one's turn and one is left that this step has not drawn."""
        every = self._rules.hard_every
        if every is None or (self.drawn + 1) % every:
            return None
        drawn = {draw.prompt for draw in self._step}
        return next((prompt for prompt in self._hard if prompt not in drawn), None)

    def _next_in_order(self) -> int:
        while (prompt := self._prompt_at(self._position)) in self._resting(self._position // self.num_prompts):
            self._position += 1
        self._position += 1
        return prompt

    def _find_resting(self, epoch: int) -> frozenset[int]:
        """Prompts to pass over in an epoch. Where all would rest, none does: there must be something to draw."""
        if self._rules.rest_after is None:
            return frozenset()
        resting = self.history.resting(epoch, self._rules.rest_after, self._rules.rest_epochs)
        return resting if len(resting) < self.num_prompts else frozenset()

    def _prompt_at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_prompts)
        return self._permutation(epoch)[place] if self._order["shuffle"] else place

    def _make_permutation(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        random.Random(f"{self._order['seed']}:{epoch}").shuffle(order)
        return order
