"""Router replay: tokens go to the experts they went to before, so that two passes differ by the weights alone.

Engine and trainer round differently, and weights move between the pass that gives the old log-probs and an update: a
token near a tie goes to other experts then, its probability jumps, and its importance ratio with it ("Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370, whose R3 this is; R2 replays the
trainer's own old routes, "Group Sequence Policy Optimization", arXiv 2507.18071, section 5.3).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.errors import UserError
from dapo_megatron.trainer.batching import MicroBatch
from dapo_megatron.trainer.device import current_device
from dapo_megatron.trainer.router import LayerReplay, ReplayedRouter


class RouterReplay:
    """The routers of a model on this rank, and the micro-batch that passes through them.

    A pass without gradients takes the routes of its micro-batch where there are any; with `records` it leaves there
    those that the routers choose. A pass with gradients needs routes.

    Args:
        modules: the model's chunks, as `run_schedule` gets them.
        records: R2.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], *, records: bool) -> None:
        self._records = records
        self._layers = {module: [_attach(router) for router in _routers(module)] for module in modules}
        sizes = [len(layers) for layers in self._layers.values()]
        self._columns = {
            module: slice(end - size, end) for module, size, end in zip(modules, sizes, accumulate(sizes), strict=True)
        }

    @contextmanager
    def passing(self, module: torch.nn.Module, micro: MicroBatch) -> Iterator[None]:
        """Within, a micro-batch passes forward through a chunk.

        Raises:
            UserError: if it is trained on and has no routes.
        """
        layers, trains = self._layers[module], torch.is_grad_enabled()
        routes = self._routes(module, micro, trains=trains)
        for i, layer in enumerate(layers):
            layer.begin(None if routes is None else routes[:, i], trains=trains)
        yield
        for layer in layers:
            layer.end()
        if self._records and not trains and layers:
            self._record(module, micro)

    def _routes(self, module: torch.nn.Module, micro: MicroBatch, *, trains: bool) -> Tensor | None:
        """What the micro-batch's routes through a chunk are to be, int16 [t, layers, k] on the device."""
        if not trains and (self._records or micro.routes is None):
            return None
        if micro.routes is None:
            raise UserError(
                "training.router_replay: the answers came without routes. External servers send them if they were "
                "started by `dapo-megatron serve` with this configuration; recorded answers (rollout.replay) have them "
                "if their run had R3"
            )
        return micro.routes[:, self._columns[module]].to(current_device())

    def _record(self, module: torch.nn.Module, micro: MicroBatch) -> None:
        """Leave the routes of the pass that has just ended with its micro-batch; padding gets none."""
        chosen = torch.stack([layer.chosen for layer in self._layers[module]], 1).to("cpu", torch.int16)
        if micro.routes is None:
            layers = sum(len(layers) for layers in self._layers.values())
            micro.routes = torch.full((len(chosen), layers, chosen.shape[-1]), -1, dtype=torch.int16)
        micro.routes[:, self._columns[module]] = torch.where(micro.routed[:, None, None], chosen, -1)

    def mismatch(self) -> float:
        """Share of the tokens with a route that the routers would have sent elsewhere, over layers and tokens of all
        training passes since the last call. A collective over all ranks.

        Raises:
            RuntimeError: if the backward pass did not compute again what it was to.
        """
        every = [layer for layers in self._layers.values() for layer in layers]
        if unused := sum(layer.unused for layer in every):
            raise RuntimeError(f"the backward pass was to route {unused} times as the forward pass did, and did not")
        counts = torch.zeros(2, dtype=torch.float64, device=current_device())
        for layer in every:
            counts += layer.counts.to(counts.device)
            layer.counts.zero_()
        dist.all_reduce(counts)
        differing, total = counts.tolist()
        return float(differing / max(1.0, total))


def _routers(module: torch.nn.Module) -> list[ReplayedRouter]:
    return [router for router in module.modules() if isinstance(router, ReplayedRouter)]


def _attach(router: ReplayedRouter) -> LayerReplay:
    router.router_replay = LayerReplay()
    return router.router_replay
