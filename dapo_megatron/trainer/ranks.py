"""What ranks tell each other outside the model: results and errors of rank 0, values by response."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.errors import UserError
from dapo_megatron.trainer.batching import MicroBatch

T = TypeVar("T")


def on_rank_zero(function: Callable[[], T]) -> T:
    """Run `function` on rank 0; every rank returns its result or raises its error. The result is pickled.

    Raises:
        UserError: on every rank, where rank 0 raised one.
        RuntimeError: on the other ranks, for any other error of rank 0, which raises the original.
    """
    outcome: list[Any] = [None, None, None]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = str(error)
        except BaseException as error:  # Ctrl-C too: the others must not wait for a result
            failure, outcome[2] = error, repr(error)
    dist.broadcast_object_list(outcome, 0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise UserError(outcome[1])
    if outcome[2] is not None:
        raise RuntimeError(f"rank 0 failed: {outcome[2]}")
    result: T = outcome[0]
    return result


def gather_by_response(micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Per-token values [n] of every rank's micro-batches, by response, on every rank and on the CPU.

    Ranks that are not on the last pipeline stage bring empty tensors. Small batches only: everything is pickled.
    """
    local = [
        (micro.responses.cpu(), micro.places.cpu(), tokens.cpu())
        for micro, tokens in zip(micro_batches, values, strict=True)
        if len(tokens)
    ]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    found: dict[int, dict[int, Tensor]] = {}  # a response's tokens may lie on several context-parallel ranks
    for responses, places, tokens in (micro for part in parts for micro in part):
        for response, place, token in zip(responses.tolist(), places.tolist(), tokens, strict=True):
            found.setdefault(response, {})[place] = token
    return {r: torch.stack([tokens[place] for place in sorted(tokens)]) for r, tokens in found.items()}
