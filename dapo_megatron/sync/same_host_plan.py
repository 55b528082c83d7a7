"""Which trainer rank feeds which worker where they share GPUs. Geometry alone, no torch.

Workers take the GPUs of the trainer ranks in order: worker w of server s has that of rank s x workers + w, which
sends all that the worker needs. What others hold is gathered to every rank first, as for an export.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.models.parameters import Parameter
from dapo_megatron.sync.plan import TransferPlan, Turn
from dapo_megatron.sync.wire import Bucket, Group


@dataclass(frozen=True)
class SameHostPlan(TransferPlan):
    """The plan of pushes to `servers`, by their numbers in the fleet. All ranks gather all rows."""

    servers: tuple[int, ...] = ()

    def shared_rows(self, rank: int, turn: Turn) -> list[Parameter]:
        """All rows, each once: with the rank's own turn, or, if it feeds nobody, with that of the first who does."""
        mine = rank if rank in self.senders else self.senders[0]
        return list(turn.rows) if turn.sender == mine else []

    def of_server(self, position: int) -> "SameHostPlan":
        """What the server at `position` among `servers` gets."""
        ranks = feeders(self.servers[position], self.server.workers)
        turns = tuple(turn for turn in self.turns if turn.sender in ranks)
        return SameHostPlan(turns, self.sources, self.server, (self.servers[position],))


def feeders(server: int, workers: int) -> range:
    """The trainer ranks that feed a server's workers, in the workers' order."""
    return range(server * workers, (server + 1) * workers)


def same_host_plan(whole: TransferPlan, servers: Sequence[int]) -> SameHostPlan:
    """The plan for `servers`, given a proved one whose only sender, rank 0, holds the whole model."""
    turns = []
    for turn in whole.turns:
        for server in servers:
            for worker, rank in enumerate(feeders(server, whole.server.workers)):
                stretches = tuple(
                    s for bucket in turn.buckets if worker in bucket.group.workers for s in bucket.stretches
                )
                buckets = (Bucket(Group(rank, (worker,)), stretches),) if stretches else ()
                turns.append(Turn(rank, turn.rows, buckets))
    return SameHostPlan(tuple(turns), whole.sources, whole.server, tuple(servers))
