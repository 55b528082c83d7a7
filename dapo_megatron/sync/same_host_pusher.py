"""Pushes from each trainer rank to the worker on its own GPU."""

from collections.abc import Sequence
from typing import Any

from dapo_megatron.sync.plan import TransferPlan
from dapo_megatron.sync.pusher import Member, WeightPusher
from dapo_megatron.sync.same_host_plan import same_host_plan


class SameHostPusher(WeightPusher):
    """A `WeightPusher` for servers on the trainers' GPUs; which ranks send follows from the servers' numbers.

    Args:
        whole: the proved plan of a trainer whose only rank, 0, holds the whole model.
        source: gathers every row, in the order of the table, to all ranks.
        options: those of `WeightPusher`, but for `way`.
    """

    def __init__(self, whole: TransferPlan, source: Any, **options: Any) -> None:
        super().__init__(whole, source, **options, way="same_host")
        self._whole = whole

    def connect(self, members: Sequence[Member]) -> None:
        """See `WeightPusher.connect`."""
        self._follow(same_host_plan(self._whole, [server_number(member) for member in members]))
        super().connect(members)


def server_number(member: Member) -> int:
    """The server's place among those that the run started: server_3 -> 3."""
    return int(member.id.rpartition("_")[2])
