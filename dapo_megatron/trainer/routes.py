"""Which of a batch's routes a rank's routers see: those of its layers, for its stretch of each micro-batch."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.placement import chunk_layers
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.types import Int16


@dataclass(frozen=True)
class RouterShare:
    """The routers on a rank. t: tokens of a micro-batch that they see.

    With sequence parallelism these are one of `parts` stretches of what its context-parallel rank has.
    """

    layers: tuple[int, ...]  # by chunk, then layer; counted from 0 among the model's layers with experts
    model_layers: int  # with experts
    experts: int
    per_token: int
    parts: int
    part: int

    @classmethod
    def of(cls, config: Config, arch: Architecture, layout: Layout) -> Self | None:
        """None where routes are not replayed."""
        if config.training.router_replay == "off":
            return None
        parallel = config.parallel
        with_experts = [layer for layer in range(arch.num_layers) if arch.has_experts(layer)]
        here = chunk_layers(arch.num_layers, parallel)[layout.pipeline_rank :: parallel.pipeline]
        return cls(
            layers=tuple(with_experts.index(layer) for chunk in here for layer in chunk if layer in with_experts),
            model_layers=len(with_experts),
            experts=arch.num_experts,
            per_token=arch.experts_per_token,
            parts=parallel.tensor if parallel.sequence else 1,
            part=layout.tensor_rank if parallel.sequence else 0,
        )

    def seen(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens that the routers see, of all that the context-parallel rank has; int64 [t]."""
        return np.split(index, self.parts)[self.part]

    def take(self, routes: Int16, origins: NDArray[np.int64], device: torch.device) -> Tensor:
        """The routes of a micro-batch through these routers, int16 [t, layers, k] in host memory.

        Args:
            routes: int16 [tokens, L, k] of all tokens and the model's layers with experts; -1: unknown.
            origins: int64 [t], where each token stands in `routes`; -1 for padding, which gets no route.
            device: where they are checked: there are billions of them in a large batch.

        Raises:
            RuntimeError: if they are not of this model.
        """
        expected = (self.model_layers, self.per_token)
        if routes.shape[1:] != expected:
            raise RuntimeError(f"routes of shape {routes.shape} do not fit {expected} (layers, experts per token)")
        taken = routes[np.ix_(origins, np.array(self.layers, np.int64))]
        taken[origins < 0] = -1
        found = torch.from_numpy(taken)
        _check(found.to(device), self.experts)
        return found


def _check(routes: Tensor, experts: int) -> None:
    """Every row is k different experts, or -1 alone: another one would hang megatron's exchange of tokens."""
    ordered = routes.sort(-1).values
    known = (ordered[..., 1:] > ordered[..., :-1]).all(-1) & (ordered[..., 0] >= 0) & (ordered[..., -1] < experts)
    wrong = ~(known | (ordered == -1).all(-1))
    if wrong.any():
        raise RuntimeError(f"a token's route {routes[wrong][0].tolist()} is not made of different experts of {experts}")
