"""A router of megatron-core that can be told where its tokens go.

megatron-core asks `router.router_replay`, where there is one, which experts are chosen, and takes their scores from the
router's own logits: whatever the choice, scores are made and normalised as the model's router does it, and gradients
reach it.
"""

from collections import deque
from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

TopK = Callable[..., tuple[Tensor, Tensor]]
"""(scores [t, E], k, num_groups=, group_topk=) -> (values [t, k], experts int64 [t, k])."""


class LayerReplay:
    """What the router of one layer is told, pass after pass. t: tokens that it sees on this rank.

    Attributes:
        chosen: int64 [t, k], where the tokens of the last pass went.
        counts: fp64 [2] over training passes, on the scores' device: tokens whose route was not the router's own
            choice, and tokens with a route.
    """

    def __init__(self) -> None:
        self.chosen = torch.empty(0, 0, dtype=torch.int64)
        self.counts = torch.zeros(2, dtype=torch.float64)
        self._routes: Tensor | None = None
        self._passes = self._trains = False
        self._again: deque[Tensor | None] = deque()

    @property
    def unused(self) -> int:
        """Passes whose activations were to be computed again and were not."""
        return len(self._again)

    def begin(self, routes: Tensor | None, *, trains: bool) -> None:
        """A micro-batch enters the model.

        Args:
            routes: int16 [t, k] on the router's device, -1 where it chooses. None: it chooses for all tokens.
            trains: whether a backward pass follows.
        """
        self._routes, self._passes, self._trains = routes, True, trains

    def end(self) -> None:
        """The micro-batch has left the model. What the router is asked from here on is a backward pass's question."""
        self._routes, self._passes = None, False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """megatron-core's hook: scores [t, k] and numbers [t, k] of the experts that tokens go to; `scores` is [t, E]
        as the router compares them.
        """
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes = self._routes if self._passes else self._again.popleft()
        self.chosen = own if routes is None else torch.where(routes >= 0, routes, own)
        if self._passes and self._trains:
            if not torch.is_grad_enabled():  # the backward pass will come here again, micro-batches in the same order
                self._again.append(routes)
            self._count(own, routes)
        return scores.gather(1, self.chosen), self.chosen

    def _count(self, own: Tensor, routes: Tensor | None) -> None:
        if routes is None:
            return
        differs = (own.sort(1).values != self.chosen.sort(1).values).any(1)
        found = torch.stack([differs.sum(), (routes[:, 0] >= 0).sum()]).double()
        self.counts = self.counts.to(found.device) + found


class ReplayedRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, whose load-balancing loss counts tokens where they were sent, not where it would."""

    router_replay: LayerReplay | None

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        if self.router_replay is not None:
            routing_map = torch.zeros_like(routing_map).scatter(1, self.router_replay.chosen, 1)
        balanced: Tensor = super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map, with_padding_mask)
        return balanced
