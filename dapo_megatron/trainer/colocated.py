"""Trainer and servers on the same GPUs: they take turns with the memory."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from dapo_megatron.config.run import Config
from dapo_megatron.monitoring.console import open_console
from dapo_megatron.rollout.handle import Rollouts
from dapo_megatron.rollout.requests import Server
from dapo_megatron.sync.conductor import Calls, Conductor
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from dapo_megatron.trainer import device
from dapo_megatron.trainer.ranks import on_rank_zero
from dapo_megatron.trainer.trained import TrainedModel

GIB = 1 << 30
logger = logging.getLogger(__name__)

T = TypeVar("T")


def shares_gpus(config: Config) -> bool:
    """Whether servers run on the trainer's own GPUs."""
    return config.has_servers and config.fleet.mode == "colocated"


def start_servers(config: Config, rollouts: Rollouts) -> None:
    """Wait for servers on the trainer's GPUs; with others there is nothing to wait for yet.

    vLLM wants its whole share of a GPU while it starts. Once healthy it sleeps until the first push, and there is
    memory to build models in.
    """
    if not shares_gpus(config):
        return
    if dist.get_rank() != 0:
        rollouts.wait_ready(lambda done, total, text: None)
        return
    with closing(open_console(config.tracking.console)) as console:  # the run's own monitor knows the state it is in
        rollouts.wait_ready(partial(console.progress, "start"))


def give_memory(models: Sequence[TrainedModel]) -> None:
    """Give up the GPU memory that only training needs, and see that it is given up. Twice does no harm.

    Raises:
        RuntimeError: if this process still holds some of it.
    """
    before = device.allocated_memory()
    given = sum(model.give_memory() for model in models)
    device.free_memory()  # gives back what this process keeps in reserve
    after = device.allocated_memory()
    if before is None or after is None:
        return
    told = f"{before / GIB:.2f} GiB were allocated, {given / GIB:.2f} GiB given up, {after / GIB:.2f} GiB are left"
    logger.info("memory of the GPU before servers generate: %s", told)
    if after > before - given:
        raise RuntimeError(f"training does not give up its memory of the GPU, which the servers need: {told}")


class Turns:
    """Who has the GPUs. All ranks call the same methods; rank 0 talks to the servers.

    A server that sleeps has neither weights nor keys and values: pushes bring the weights. While servers generate the
    trainer keeps its weights alone; see `TrainedModel.give_memory`.

    Args:
        models: those that are trained.
        timeout: seconds; the deadline of each request.
    """

    def __init__(self, models: Sequence[TrainedModel], timeout: float) -> None:
        self._models, self._timeout = models, timeout
        self._needed = 0  # bytes of this rank's GPU that training took beyond what is held while servers generate
        give_memory(models)

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
            model.take_memory()

    def take_weights(self, servers: Sequence[Server]) -> None:
        """Training has given up its memory: let the servers take some for their weights, before a push.

        Raises:
            ServerError: on every rank, if one fails.
        """
        self._needed = device.peak_growth()
        _agreed(lambda: self._ask(servers, ServerAdmin.wake_weights))

    def generate(self, servers: Sequence[Server]) -> None:
        """After a push: let the servers take memory for keys and values, and answer.

        Raises:
            ServerError: on every rank, if one fails.
        """
        _agreed(lambda: self._ask(servers, ServerAdmin.wake_cache))

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
