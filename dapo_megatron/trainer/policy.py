"""The policy that is trained: log-probs of a batch, and one optimizer update from a mini-batch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.correction import RolloutCorrection, rollout_correction
from dapo_megatron.algorithm.policy_loss import clip_range, policy_loss, response_log_ratio_sums
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.run import Config
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer import device
from dapo_megatron.trainer.batching import Batch, MicroBatch, MiniBatch, PackingRules
from dapo_megatron.trainer.build import build_model, export_weights, load_weights
from dapo_megatron.trainer.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.precision import check_machine

# Summed over the tokens of a mini-batch and divided by their number, and taken at their largest.
MEANS = (
    "clip_high",
    "clip_low",
    "clip_dual",
    "entropy",
    "log_ratio_abs",
    "rollout_diff",
    "rollout_weight",
    "rollout_truncated",
    "rollout_masked",
)
MAXIMA = ("ratio_max", "rollout_diff_max")
Metrics = dict[str, float]
_Outputs = tuple[Tensor, Tensor]  # log-probs fp32 [n], entropy fp32 [n]


def combine(updates: Sequence[Metrics], *, recomputed: bool = True) -> Metrics:
    """Metrics of a step from those of its updates: means, and the largest of MAXIMA.

    `first_log_ratio` is the first update's mean |log r|: 0 where the trainer's kernels are deterministic (law 6). It is
    left out where pi_old was not `recomputed`: it would be the difference between engine and trainer.
    """
    if not updates:
        return {}
    combined = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    combined |= {name: max(update[name] for update in updates) for name in MAXIMA}
    return combined | ({"first_log_ratio": updates[0]["log_ratio_abs"]} if recomputed else {})


class Policy:
    """A Megatron model with its optimizer and schedule, in one layout.

    Args:
        config: the run's configuration.
        layout: this rank's place in it.
        checkpoint: Hugging Face folder to load; `config.model.path` where None.

    Raises:
        UserError: if the model, the layout, the precision and this machine do not fit together.
    """

    def __init__(self, config: Config, layout: Layout, checkpoint: str | None = None) -> None:
        path = checkpoint or config.model.path
        self.config, self.layout, self.arch = config, layout, architecture_of(path)
        check_precision(self.arch, config.training, config.optimizer, config.parallel, model=path)
        check_machine(config.training, config.optimizer, config.parallel)
        self.packing = PackingRules.of(config, self.arch, layout)
        self.chunks = build_model(self.arch, config.parallel, config.training, temperature=config.rollout.temperature)
        reader = HFReader(path)
        masters = [load_weights(chunk, reader) for chunk in self.chunks]
        self.ddp = wrap_data_parallel(self.chunks, config.training)
        self.optimizer = build_optimizer(self.ddp, config.optimizer, config.training, masters)
        self.scheduler = build_scheduler(self.optimizer, config.optimizer)
        megatron_config = self.chunks[0].config
        megatron_config.finalize_model_grads_func = finalize_model_grads
        megatron_config.grad_scale_func = self.optimizer.scale_loss  # fp16's loss scale; 1 otherwise

    def old_log_probs(self, batch: Batch) -> list[Tensor]:
        """Log-probs under pi_old, as `algorithm.old_log_probs` says: by this policy or the engine, fp32 [n] each."""
        recomputed = self.config.algorithm.old_log_probs == "recompute"
        return self.log_probs(batch) if recomputed else batch.rollout_log_probs()

    def log_probs(self, batch: Batch) -> list[Tensor]:
        """Log-probs of the response tokens under the current weights, per micro-batch of this rank.

        The forward pass runs on the update's own micro-batches, so that the first update starts at a ratio of
        exactly 1 wherever kernels are deterministic.

        Returns:
            fp32 [n] tensors; empty ones on all but the last pipeline stage.
        """
        micro_batches = batch.micro_batches()
        if not micro_batches:
            return []

        def collect(micro: MicroBatch, outputs: _Outputs) -> tuple[Tensor, Tensor, Tensor]:
            loss = outputs[0].sum()  # megatron wants one
            return loss, torch.zeros_like(loss, dtype=torch.int), outputs[0]

        with torch.no_grad():
            stored = self._run(micro_batches, collect, forward_only=True)
        return stored or [torch.empty(0)] * len(micro_batches)

    def start_step(self) -> None:
        """Advance the schedules of learning rate and clip range: once per rollout step, for all its updates."""
        self.scheduler.step(1)

    def update(self, mini_batch: MiniBatch) -> Metrics:
        """One optimizer step on a mini-batch. Returns metrics over the whole mini-batch, the same on every rank.

        Raises:
            RuntimeError: if a gradient is not finite. Not with fp16, whose loss scale is then lowered and the step
                skipped, which the metric `skipped_updates` counts, as it does mini-batches without any token.
        """
        metrics = self.gradients(mini_batch)
        lr = self.optimizer.param_groups[0]["lr"]
        if not mini_batch.num_tokens:  # all filtered: momentum and weight decay alone would still move the weights
            return metrics | {"grad_norm": 0.0, "lr": lr, "skipped_updates": 1.0}
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded and self.config.training.precision != "fp16":
            raise RuntimeError("the optimizer step was skipped: gradients are not finite")
        device.release_memory()
        return metrics | {
            "grad_norm": float(grad_norm) if succeeded else float("nan"),
            "lr": lr,
            "skipped_updates": float(not succeeded),
        }

    def gradients(self, mini_batch: MiniBatch, *, force_all_reduce: bool = False) -> Metrics:
        """Fill the main gradients with those of the mini-batch's loss; metrics over all its tokens.

        Args:
            mini_batch: this rank's micro-batches.
            force_all_reduce: leave the whole reduced gradient on every rank, not only the rank's share.
        """
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        stored = self._run(
            mini_batch.micro_batches,
            partial(self._loss, mini_batch, self._algorithm_now()),
            forward_only=False,
            force_all_reduce=force_all_reduce,
        )
        return self._reduce(stored, mini_batch.num_tokens)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of all weights; a collective over the ranks with `layout.sends_weights`."""
        return export_weights(self.chunks)

    def _run(self, micro_batches: list[MicroBatch], loss: Callable[..., Any], **options: Any) -> list[Any]:
        """Megatron's schedule over the micro-batches; what `loss` stored, on the last pipeline stage."""

        def forward(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            micro = next(batches)
            outputs = model(micro.input_ids, None, None, labels=micro.targets, packed_seq_params=micro.packed)
            return outputs, partial(loss, micro)

        schedule: Callable[..., list[Any]] = get_forward_backward_func()
        return schedule(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].total_length,  # used by interleaved pipelines alone: there all are alike
            micro_batch_size=1,
            **options,
        )

    def _algorithm_now(self) -> AlgorithmConfig:
        """The algorithm's section, with the clip range of this rollout step.

        The learning-rate schedule counts the steps, and a resumed run has its count.
        """
        algorithm = self.config.algorithm
        low, high = clip_range(algorithm.clip, self.scheduler.num_steps)
        clip = algorithm.clip.model_copy(update={"low": low, "high": high, "warmup": None})
        return algorithm.model_copy(update={"clip": clip})

    def _loss(
        self, mini_batch: MiniBatch, algorithm: AlgorithmConfig, micro: MicroBatch, outputs: _Outputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, tokens, metrics [1 + MEANS + MAXIMA]) of one micro-batch.

        Megatron sums the losses over micro-batches, data- and context-parallel ranks and divides by the sum of the
        tokens. Every part of `aggregate` is a share of the mini-batch's loss; times the mini-batch's tokens, which
        the division takes out again, it is exact for every aggregation.
        """
        log_probs, entropy = outputs
        mask = torch.ones_like(log_probs, dtype=torch.bool)
        result = policy_loss(
            log_probs,
            micro.old_log_probs,
            micro.advantages,
            mask,
            micro.responses,
            algorithm,
            sequence_log_ratio=self._sequence_log_ratio(micro, log_probs, micro.old_log_probs)
            if algorithm.loss == "gspo"
            else None,
        )
        correction = self._correction(micro, mask)
        losses = result.losses * correction.weights
        if algorithm.entropy_coefficient:
            losses = losses - algorithm.entropy_coefficient * entropy  # aggregation is linear
        loss = aggregate(
            losses,
            mask,
            micro.responses,
            algorithm.aggregation,
            max_tokens=self.config.rollout.max_tokens,
            num_tokens=mini_batch.num_tokens,
            num_responses=mini_batch.num_responses,
            response_lengths=micro.response_lengths,
        )
        with torch.no_grad():
            log_ratio = (log_probs - micro.old_log_probs).abs()
            rollout_diff = (micro.old_log_probs - micro.rollout_log_probs).abs()
            sums = (
                result.clipped_high,
                result.clipped_low,
                result.clipped_dual,
                entropy,
                log_ratio,
                rollout_diff,
                correction.ratio,
                correction.truncated,
                correction.masked,
            )
            largest = (result.ratio, rollout_diff)
            stored = torch.stack(
                [loss.double()]
                + [value.double().sum() for value in sums]
                + [value.double().amax() if len(value) else value.double().sum() for value in largest]
            )
        # A micro-batch without tokens still takes part in the backward pass.
        total = loss * mini_batch.num_tokens if len(log_probs) else log_probs.sum() * 0.0
        return total, torch.tensor(len(log_probs), dtype=torch.int, device=log_probs.device), stored

    def _correction(self, micro: MicroBatch, mask: Tensor) -> RolloutCorrection:
        """Weights of this rank's tokens for the difference between trainer and engine."""
        old, rollout, config = micro.old_log_probs, micro.rollout_log_probs, self.config.algorithm.rollout_correction
        return rollout_correction(
            old,
            rollout,
            mask,
            micro.responses,
            config,
            sequence_log_ratio=None if config.level == "token" else self._sequence_log_ratio(micro, old, rollout),
            response_lengths=micro.response_lengths,
        )

    def _sequence_log_ratio(self, micro: MicroBatch, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
        """For each token the mean of `log_probs - old_log_probs` over its whole response, of which this rank may hold
        a part. fp64 [n].
        """
        mask = torch.ones_like(log_probs, dtype=torch.bool)
        sums = response_log_ratio_sums(log_probs, old_log_probs, mask, micro.responses, micro.batch_responses)
        if self.layout.context > 1:
            dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        return sums[micro.responses] / micro.response_lengths

    def _reduce(self, stored: list[Tensor], num_tokens: int) -> Metrics:
        """Metrics of the mini-batch over micro-batches, data and context ranks and (by broadcast) pipeline stages."""
        num_sums = 1 + len(MEANS)
        values = torch.zeros(num_sums + len(MAXIMA), dtype=torch.float64, device=device.current_device())
        if stored:
            every = torch.stack(stored)
            values = torch.cat([every[:, :num_sums].sum(0), every[:, num_sums:].amax(0)])
        sums, maxima = values[:num_sums].contiguous(), values[num_sums:].contiguous()
        data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=data_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=data_group)
        if self.layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(sums, last, group=group)
            dist.broadcast(maxima, last, group=group)
        loss, *means = sums.tolist()
        averages = {name: value / max(1, num_tokens) for name, value in zip(MEANS, means, strict=True)}
        return {"loss": loss} | averages | dict(zip(MAXIMA, maxima.tolist(), strict=True))
