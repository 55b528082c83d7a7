"""The order in which prompts are drawn, resumable from one number."""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dapo_megatron.errors import UserError


class PromptCursor:
    """Draws prompts 0 .. num_prompts-1, epoch after epoch, each epoch in an order of its own.

    The n-th draw of a run is a function of n and the seed, so the count of draws is the whole state, and giving
    prompts back is counting down. `fingerprint` identifies the data set: a state of other data is refused.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, fingerprint: str = ""):
        if num_prompts < 1:
            raise ValueError("a cursor needs at least one prompt")
        self._data = {"num_prompts": num_prompts, "fingerprint": fingerprint}
        self._order = {"seed": seed, "shuffle": shuffle}
        self.num_prompts = num_prompts
        self.drawn = 0
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)  # two: giving back may cross an epoch

    def draw(self) -> int:
        """The next prompt."""
        self.drawn += 1
        return self._prompt_at(self.drawn - 1)

    def requeue(self, prompts: Sequence[int]) -> None:
        """Put the last prompts drawn back at the head, to be drawn again in the same order.

        Raises:
            ValueError: when they are not the last ones drawn, in the order they were drawn.
        """
        first = self.drawn - len(prompts)
        if first < 0 or list(prompts) != [self._prompt_at(draw) for draw in range(first, self.drawn)]:
            raise ValueError("only the last prompts drawn can be put back, in the order in which they were drawn")
        self.drawn = first

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state of constant size."""
        return {"drawn": self.drawn, **self._data, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

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

    def _prompt_at(self, draw: int) -> int:
        epoch, position = divmod(draw, self.num_prompts)
        return self._permutation(epoch)[position] if self._order["shuffle"] else position

    def _make_permutation(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        random.Random(f"{self._order['seed']}:{epoch}").shuffle(order)
        return order
