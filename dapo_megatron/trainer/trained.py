"""What every model that is trained has: chunks in a layout, optimizer, schedule, passes over micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.config.training import OptimizerConfig
from dapo_megatron.trainer import device
from dapo_megatron.trainer.batching import MicroBatch, MiniBatch
from dapo_megatron.trainer.build import ModelChunk
from dapo_megatron.trainer.host_memory import HostMemory
from dapo_megatron.trainer.optimizer import build_optimizer, build_scheduler, inner_optimizers, wrap_data_parallel
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.router_replay import RouterReplay

Metrics = dict[str, float]
Loss = Callable[[MicroBatch, Any], tuple[Tensor, Tensor, Any]]
"""(micro-batch, the model's outputs) -> (loss x tokens of the mini-batch, tokens int [], what is kept)."""


def run_schedule(
    modules: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    replay: RouterReplay | None = None,
    **options: Any,
) -> list[Any]:
    """Megatron's pipeline schedule over the micro-batches; what `loss` kept of each, on the last pipeline stage."""

    def forward(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        micro = next(batches)
        with replay.passing(model, micro) if replay is not None else nullcontext():
            outputs = model(micro.input_ids, None, None, labels=micro.targets, packed_seq_params=micro.packed)
        return outputs, lambda result: loss(micro, result)

    schedule: Callable[..., list[Any]] = get_forward_backward_func()
    return schedule(
        forward_step_func=forward,
        data_iterator=[iter(micro_batches) for _ in modules],
        model=list(modules),
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].total_length,  # used by interleaved pipelines alone: there all are alike
        micro_batch_size=1,
        **options,
    )


def outputs_of(
    modules: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    choose: Callable[[Any], Tensor],
    replay: RouterReplay | None = None,
) -> list[Tensor]:
    """What `choose` takes of the model's outputs, per micro-batch, without gradients.

    Returns:
        [n] tensors; empty ones on all but the last pipeline stage.
    """
    if not micro_batches:
        return []

    def keep(micro: MicroBatch, outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        chosen = choose(outputs)
        loss = chosen.sum()  # megatron wants one
        return loss, torch.zeros_like(loss, dtype=torch.int), chosen

    with torch.no_grad():
        kept = run_schedule(modules, micro_batches, keep, replay, forward_only=True)
    return kept or [torch.empty(0)] * len(micro_batches)


class TrainedModel:
    """Model chunks on this rank with their optimizer and schedule. `replay` is the policy's, where it is configured.

    Args:
        config: the run's configuration.
        layout: this rank's place in it.
        chunks: the model's chunks on this rank.
        masters: for each chunk, local shards in the precision of the checkpoint, by parameter name.
        optimizer: settings of its AdamW.
    """

    replay: RouterReplay | None = None

    def __init__(
        self,
        config: Config,
        layout: Layout,
        chunks: Sequence[ModelChunk],
        masters: Sequence[dict[str, Tensor]],
        optimizer: OptimizerConfig,
    ) -> None:
        self.config, self.layout, self.chunks = config, layout, chunks
        self.ddp: list[DistributedDataParallel] = wrap_data_parallel(chunks, config.training)
        self.optimizer = build_optimizer(self.ddp, optimizer, config.training, masters)
        self.scheduler = build_scheduler(self.optimizer, optimizer)
        self._host = HostMemory(pinned=device.has_cuda())
        self._away = False  # whether only the weights are on the device
        self._stateless: list[tuple[torch.optim.Optimizer, Tensor]] = []  # masters without states when they went away
        megatron_config = chunks[0].config
        megatron_config.finalize_model_grads_func = finalize_model_grads
        megatron_config.grad_scale_func = self.optimizer.scale_loss  # fp16's loss scale; 1 otherwise

    def start_step(self) -> None:
        """Advance the schedules: once per rollout step, for all its updates."""
        self.scheduler.step(1)

    def backward(self, mini_batch: MiniBatch, loss: Loss, *, force_all_reduce: bool = False) -> list[Any]:
        """Fill the main gradients with those of the mini-batch's loss; what `loss` kept of each micro-batch.

        Megatron sums the losses over micro-batches, data- and context-parallel ranks and divides by the sum of the
        tokens: `loss` returns a share of the mini-batch's loss, times the mini-batch's tokens.

        Args:
            mini_batch: this rank's micro-batches.
            loss: of one micro-batch.
            force_all_reduce: leave the whole reduced gradient on every rank, not only the rank's share.
        """
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return run_schedule(
            self.ddp, mini_batch.micro_batches, loss, self.replay, forward_only=False, force_all_reduce=force_all_reduce
        )

    def apply_gradients(self, mini_batch: MiniBatch) -> Metrics:
        """One optimizer step with the gradients of `backward`.

        Raises:
            RuntimeError: if a gradient is not finite. Not with fp16, whose loss scale is then lowered and the step
                skipped, which the metric `skipped_updates` counts, as it does mini-batches without any token.
        """
        lr = self.optimizer.param_groups[0]["lr"]
        if not mini_batch.num_tokens:  # all filtered: momentum and weight decay alone would still move the weights
            return {"grad_norm": 0.0, "lr": lr, "skipped_updates": 1.0}
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded and self.config.training.precision != "fp16":
            raise RuntimeError("the optimizer step was skipped: gradients are not finite")
        device.release_memory()
        norm = float(grad_norm) if succeeded else float("nan")
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(not succeeded)}

    def give_memory(self) -> int:
        """Give up the device memory that only updates need, until `take_memory`. Twice does no harm.

        Main gradients are dropped, as every `backward` begins from zeros. Master weights and the optimizer's states
        wait in host memory, where a checkpoint finds them. The weights stay: pushes, probes and log-probs read them.

        Returns:
            Bytes of the device that this process has less of now.
        """
        if self._away:
            return 0
        self._away = True
        self.optimizer.zero_grad()  # masters refer to the gradients of the last update
        freed = 0
        for gradients in self._gradient_buffers():
            freed += gradients.nbytes
            gradients.untyped_storage().resize_(0)
        self._stateless = [
            (inner, master)
            for inner in inner_optimizers(self.optimizer)
            for master in _masters(inner)
            if not inner.state.get(master)
        ]
        return freed + self._host.store(self._optimizer_tensors())

    def take_memory(self) -> None:
        """Take the memory again that was given up, and bring back what it held."""
        if not self._away:
            return
        self._away = False
        for gradients in self._gradient_buffers():
            gradients.untyped_storage().resize_(gradients.nbytes)
            gradients.zero_()
        place = device.current_device()
        self._host.fetch(place)
        for inner, master in self._stateless:  # a checkpoint may have made states where the masters were
            for value in filter(torch.is_tensor, inner.state.get(master, {}).values()):
                value.data = value.to(place, copy=True)

    def _buffers(self) -> list[Any]:
        """Megatron's buffers of parameters and gradients."""
        return [buffer for chunk in self.ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _gradient_buffers(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in self._buffers()]

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Master weights and states on this rank's device, but for masters that are the weights themselves.

        Megatron's own `offload_to_cpu` moves those, too, which frees nothing, and leaves them on the device twice when
        they are back; its precision-aware optimizer would then update copies that no model reads.
        """
        weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in self._buffers()}
        for inner in inner_optimizers(self.optimizer):
            states = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            for tensor in (*_masters(inner), *states):
                if tensor.device == device.current_device() and tensor.untyped_storage().data_ptr() not in weights:
                    yield tensor

    def reduce(self, stored: Sequence[Tensor], sums: Sequence[str], maxima: Sequence[str] = ()) -> Metrics:
        """Values of a mini-batch over micro-batches, data and context ranks and (by broadcast) pipeline stages.

        Args:
            stored: per micro-batch, fp64 [sums + maxima]; empty on all but the last pipeline stage.
            sums: names of the values that are added up.
            maxima: names of those of which the largest counts.
        """
        values = torch.zeros(len(sums) + len(maxima), dtype=torch.float64, device=device.current_device())
        if stored:
            every = torch.stack(list(stored))
            values = torch.cat([every[:, : len(sums)].sum(0), every[:, len(sums) :].amax(0)])
        added, largest = values[: len(sums)].contiguous(), values[len(sums) :].contiguous()
        data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(added, group=data_group)
        if maxima:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=data_group)
        values = torch.cat([added, largest])
        if self.layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return dict(zip([*sums, *maxima], values.tolist(), strict=True))


def _masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a torch optimizer updates."""
    return [master for group in optimizer.param_groups for master in group["params"]]


def means(sums: Mapping[str, float], count: int) -> Metrics:
    """Each sum over `count` things; over none they are 0."""
    return {name: value / max(1, count) for name, value in sums.items()}
