"""Trainer and servers on the same GPUs: they take turns with the memory."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from dapo_megatron.rollout.requests import Server
from dapo_megatron.sync.conductor import Calls, Conductor
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from dapo_megatron.trainer import device
from dapo_megatron.trainer.ranks import on_rank_zero
from dapo_megatron.trainer.trained import TrainedModel

GIB = 1 << 30
logger = logging.getLogger(__name__)

T = TypeVar("T")


class Turns:
    """Who has the GPUs. All ranks call the same methods; rank 0 talks to the servers.

    A server that sleeps has neither weights nor keys and values: pushes bring the weights. While servers generate the
    trainer keeps its weights and its optimizer's states, and gives up the gradients' memory.

    Args:
        models: those that are trained.
        timeout: seconds; the deadline of each request.
    """

    def __init__(self, models: Sequence[TrainedModel], timeout: float) -> None:
        self._models, self._timeout = models, timeout
        self._needed = 0  # bytes of this rank's GPU that training took beyond what is held while servers generate
        self._free()

    def train(self, servers: Sequence[Server]) -> None:
        """Let the servers sleep, and see that the trainer has the memory that it needs.

        Raises:
            RuntimeError: if it has not.
        """

        def sleep() -> None:
            with self._calls(servers, ServerAdmin.sleep) as (calls, deadline):
                for error in calls.settled(deadline):  # if it has died, its memory is free; the next push finds out
                    logger.warning("a server does not go to sleep: %s", error)

        on_rank_zero(sleep)
        free = device.free_memory()
        if free is not None and free < self._needed:
            raise RuntimeError(
                f"training needs {self._needed / GIB:.1f} GiB of the GPU, but {free / GIB:.1f} GiB are free while the "
                "servers sleep: lower fleet.gpu_memory_utilization or training.micro_batch_tokens"
            )
        for model in self._models:
            model.allocate_gradients()

    def take_weights(self, servers: Sequence[Server]) -> None:
        """Training is over: let the servers take memory for their weights, before a push.

        Raises:
            ServerError: on every rank, if one fails.
        """
        self._free()
        _agreed(lambda: self._ask(servers, ServerAdmin.wake_weights))

    def generate(self, servers: Sequence[Server]) -> None:
        """After a push: let the servers take memory for keys and values, and answer.

        Raises:
            ServerError: on every rank, if one fails.
        """
        _agreed(lambda: self._ask(servers, ServerAdmin.wake_cache))

    def _free(self) -> None:
        for model in self._models:
            model.free_gradients()
        device.free_memory()  # gives back what this process keeps in reserve
        self._needed = device.peak_growth()

    def _ask(self, servers: Sequence[Server], request: Callable[[ServerAdmin], None]) -> None:
        with self._calls(servers, request) as (calls, deadline):
            calls.results(deadline)

    @contextmanager
    def _calls(
        self, servers: Sequence[Server], request: Callable[[ServerAdmin], None]
    ) -> Iterator[tuple[Calls[None], float]]:
        """The request under way to all, and its deadline."""
        conductor = Conductor([(server.url, server.token) for server in servers], self._timeout)
        try:
            yield Calls(conductor.admins, lambda admin, _: request(admin)), time.monotonic() + self._timeout
        finally:
            conductor.close()


def _agreed(function: Callable[[], T]) -> T:
    """Its result from rank 0; a ServerError is raised on every rank."""

    def outcome() -> T | ServerError:
        try:
            return function()
        except ServerError as error:
            return error

    found = on_rank_zero(outcome)
    if isinstance(found, ServerError):
        raise found
    return found
