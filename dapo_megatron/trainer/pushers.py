"""How a run's weights leave the trainer: broadcast, as changes, or to servers on the same GPUs; plain or in FP8."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.models.parameters import EMBEDDING, Parameter
from dapo_megatron.sync.fp8_format import Fp8Source
from dapo_megatron.sync.fp8_plan import quantized_matrices
from dapo_megatron.sync.plan import TransferPlan
from dapo_megatron.sync.pusher import WeightPusher
from dapo_megatron.sync.same_host_pusher import SameHostPusher
from dapo_megatron.sync.sender import WeightSource
from dapo_megatron.trainer import device
from dapo_megatron.trainer.build import WeightSource as ShardSource
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import on_rank_zero


def new_pusher(config: Config, policy: Policy, plan: TransferPlan) -> WeightPusher:
    """A pusher of the policy's weights as `plan`, that of `sync.proof.proved_plan`, says; all ranks make one."""
    fleet = config.fleet
    colocated = fleet.mode == "colocated"
    source: WeightSource = WholeSource(policy.export) if colocated else ShardSource(policy.chunks)
    if fleet.weight_format == "fp8_block":
        source = Fp8Source(source, policy.arch, quantized_matrices(policy.arch))
    options: dict[str, Any] = {
        "rank": policy.layout.rank,
        "agree": on_rank_zero,
        "host": fleet.host,
        "timeout": fleet.push_timeout,
        "backend": device.backend(),
    }
    if colocated:
        return SameHostPusher(plan, source, **options)
    return WeightPusher(plan, source, **options, way="delta" if fleet.delta_push else "broadcast")


class WholeSource:
    """The whole model on every rank: `export` yields (Hugging Face name, tensor) in the order of the table.

    A collective over all ranks, which gather the same rows.
    """

    def __init__(self, export: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._export = export
        self._rest: Iterator[tuple[str, Tensor]] = iter(())

    def gather(self, row: Parameter) -> list[Tensor]:
        """The row's tensors; rows come in the order of the table, and the first one begins a new push."""
        if row.name == EMBEDDING:
            self._rest = iter(self._export())
        found = [next(self._rest) for _ in row.hf_names]
        if (names := tuple(name for name, _ in found)) != row.hf_names:
            raise RuntimeError(f"the push asks for {row.hf_names}, the export yields {names}")
        return [tensor for _, tensor in found]
