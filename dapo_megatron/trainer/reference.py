"""The frozen reference policy: log-probs of a batch, in a layout and a precision of its own."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.reference_view import reference_config, reference_keys
from dapo_megatron.config.run import Config
from dapo_megatron.errors import renamed_keys
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer import device
from dapo_megatron.trainer.batching import Batch, PackingRules, load_batch
from dapo_megatron.trainer.build import PolicyModel, build_model, load_weights
from dapo_megatron.trainer.columns import gather_column
from dapo_megatron.trainer.host_memory import HostMemory
from dapo_megatron.trainer.layers import resolve_backend
from dapo_megatron.trainer.parallel import Layout, OtherLayout
from dapo_megatron.trainer.precision import check_machine
from dapo_megatron.trainer.trained import outputs_of


class HostWeights:
    """Parameters that stay in host memory and visit a device.

    They never change, so that their way back costs nothing: what is on the device is dropped.

    Args:
        parameters: on any device; they are in host memory from here on.
        pinned: page-locked memory, from which a GPU copies fastest.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, pinned: bool) -> None:
        self._memory = HostMemory(pinned=pinned)
        self._memory.store(parameters)

    @contextmanager
    def on(self, place: torch.device) -> Iterator[None]:
        """Within, the parameters have copies on a device."""
        self._memory.fetch(place)
        try:
            yield
        finally:
            self._memory.drop()


class Reference:
    """A Megatron model without gradients and optimizer, on the ranks of the policy.

    Args:
        config: the run's configuration; its section `reference` says what differs from the policy at the start.
        layout: this rank's place in the policy's layout.

    Raises:
        UserError: if the model, the layout, the precision and this machine do not fit together.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        own = reference_config(config)
        with renamed_keys(reference_keys(config)):
            self._policy_layout = layout
            self._other = OtherLayout(own.parallel) if own.parallel != config.parallel else None
            self._layout = self._other.layout if self._other is not None else layout
            with self._in_layout():
                self._chunks = _frozen_chunks(own)
            self.arch = self._chunks[0].arch
            self._packing = PackingRules.of(own, self.arch, self._layout)
        # Attention reads sequences as its own backend packs them.
        self._shares_batches = self._other is None and resolve_backend(own.training) == resolve_backend(config.training)
        self._host: HostWeights | None = None
        if config.reference.offload and device.has_cuda():
            self._host = HostWeights((p for chunk in self._chunks for p in chunk.parameters()), pinned=True)

    def log_probs(self, batch: Batch) -> list[Tensor]:
        """Log-probs of the response tokens under the reference, per micro-batch of the policy's batch on this rank.

        In the policy's layout they run on the policy's own micro-batches: while the weights are the same, so is every
        bit of the log-probs, wherever kernels are deterministic. In another, the batch is packed again.

        Args:
            batch: packed for the policy.

        Returns:
            fp32 [n] tensors; empty ones on all but the last pipeline stage of the policy.
        """
        if self._shares_batches:
            return self._pass(batch)
        own = load_batch(batch.header, self._packing, self._layout, batch.fetch)
        column = gather_column(own, self._pass(own), self._layout)
        if self._policy_layout.pipeline_rank == self._policy_layout.pipeline - 1:
            return batch.pick(column)
        return [torch.empty(0)] * len(batch.micro_batches())

    def _pass(self, batch: Batch) -> list[Tensor]:
        """Log-probs per micro-batch of a batch that is packed for this model."""
        with self._in_layout(), self._on_device():
            return outputs_of(self._chunks, batch.micro_batches(), lambda outputs: outputs[0])

    def _in_layout(self) -> AbstractContextManager[None]:
        return nullcontext() if self._other is None else self._other.active()

    def _on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._host is None else self._host.on(device.current_device())


def _frozen_chunks(config: Config) -> list[PolicyModel]:
    """The model's chunks on this rank, in the layout that Megatron knows."""
    path = config.model.path
    arch = architecture_of(path)
    check_precision(arch, config.training, config.optimizer, config.parallel, model=path)
    check_machine(config.training, config.optimizer, config.parallel)
    chunks = build_model(arch, config.parallel, config.training, temperature=config.rollout.temperature)
    reader = open_weights(path)
    for chunk in chunks:
        load_weights(chunk, reader)
    return chunks
