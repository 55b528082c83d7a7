"""The policy that is trained: log-probs of a batch, and one optimizer update from a mini-batch."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.correction import RolloutCorrection, rollout_correction
from dapo_megatron.algorithm.kl import kl_penalty
from dapo_megatron.algorithm.policy_loss import clip_range, policy_loss, response_log_ratio_sums
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.run import Config
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer.batching import Batch, MicroBatch, MiniBatch, PackingRules
from dapo_megatron.trainer.build import build_model, export_weights, load_weights
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.precision import check_machine
from dapo_megatron.trainer.router_replay import RouterReplay
from dapo_megatron.trainer.trained import Metrics, TrainedModel, means, outputs_of

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
    "clip_high_probability",
    "kl",
)
MAXIMA = ("ratio_max", "rollout_diff_max")
_Outputs = tuple[Tensor, Tensor]  # log-probs fp32 [n], entropy fp32 [n]


def combine(updates: Sequence[Metrics], *, recomputed: bool = True) -> Metrics:
    """Metrics of a step from those of its updates: means, and the largest of MAXIMA.

    `clip_high_probability`, the mean probability of tokens whose ratio was clipped above (the paper's figure 3a), is
    that of all updates together, and NaN where nothing was clipped. `first_log_ratio` is the first update's mean
    |log r|: 0 where the trainer's kernels are deterministic (law 6). It is left out where pi_old was not `recomputed`:
    it would be the difference between engine and trainer.
    """
    if not updates:
        return {}
    combined = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    combined |= {name: max(update[name] for update in updates) for name in MAXIMA}
    clipped = combined["clip_high"]
    combined["clip_high_probability"] = combined["clip_high_probability"] / clipped if clipped else math.nan
    return combined | ({"first_log_ratio": updates[0]["log_ratio_abs"]} if recomputed else {})


class Policy(TrainedModel):
    """A Megatron model with its optimizer and schedule, in one layout.

    Args:
        config: the run's configuration.
        layout: this rank's place in it.
        checkpoint: folder to load, Hugging Face's or Megatron's; `config.model.path` where None.

    Raises:
        UserError: if the model, the layout, the precision and this machine do not fit together.
    """

    def __init__(self, config: Config, layout: Layout, checkpoint: str | None = None) -> None:
        path = checkpoint or config.model.path
        self.arch = architecture_of(path)
        check_precision(self.arch, config.training, config.optimizer, config.parallel, model=path)
        check_machine(config.training, config.optimizer, config.parallel)
        self.packing = PackingRules.of(config, self.arch, layout)
        chunks = build_model(self.arch, config.parallel, config.training, temperature=config.rollout.temperature)
        reader = open_weights(path)
        masters = [load_weights(chunk, reader) for chunk in chunks]
        super().__init__(config, layout, chunks, masters, config.optimizer)
        if (replayed := config.training.router_replay) != "off":
            self.replay = RouterReplay(self.ddp, records=replayed == "R2")

    def old_log_probs(self, batch: Batch) -> list[Tensor]:
        """Log-probs under pi_old, as `algorithm.old_log_probs` says: by this policy or the engine, fp32 [n] each."""
        recomputed = self.config.algorithm.old_log_probs == "recompute"
        return self.log_probs(batch) if recomputed else batch.rollout_log_probs()

    def log_probs(self, batch: Batch) -> list[Tensor]:
        """Log-probs of the response tokens under the current weights, per micro-batch of this rank.

        The forward pass runs on the update's own micro-batches, so that the first update starts at a ratio of
        exactly 1 wherever kernels are deterministic. Router replay takes its routes from the batch (R3), or leaves them
        there for the updates (R2).

        Returns:
            fp32 [n] tensors; empty ones on all but the last pipeline stage.
        """
        return outputs_of(self.ddp, batch.micro_batches(), lambda outputs: outputs[0], self.replay)

    def update(self, mini_batch: MiniBatch) -> Metrics:
        """One optimizer step on a mini-batch. Returns metrics over the whole mini-batch, the same on every rank.

        Raises:
            RuntimeError: if a gradient is not finite, see `TrainedModel.apply_gradients`.
        """
        return self.gradients(mini_batch) | self.apply_gradients(mini_batch)

    def gradients(self, mini_batch: MiniBatch, *, force_all_reduce: bool = False) -> Metrics:
        """Fill the main gradients with those of the mini-batch's loss; metrics over all its tokens.

        Args:
            mini_batch: this rank's micro-batches.
            force_all_reduce: leave the whole reduced gradient on every rank, not only the rank's share.
        """
        loss = partial(self._loss, mini_batch, self._algorithm_now())
        stored = self.backward(mini_batch, loss, force_all_reduce=force_all_reduce)
        values = self.reduce(stored, ("loss", *MEANS), MAXIMA)
        averages = means({name: values[name] for name in MEANS}, mini_batch.num_tokens)
        routed = {"router_mismatch": self.replay.mismatch()} if self.replay is not None else {}
        return values | averages | routed

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of all weights; a collective over the ranks with `layout.sends_weights`."""
        return export_weights(self.chunks)

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

        Every part of `aggregate` is a share of the mini-batch's loss; times the mini-batch's tokens, which megatron
        divides by, it is exact for every aggregation.
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
        kl = self._kl(micro, log_probs, algorithm)
        if algorithm.kl.place == "loss":
            losses = losses + algorithm.kl.coefficient * kl
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
                log_probs.exp() * result.clipped_high,
                kl,
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

    def _kl(self, micro: MicroBatch, log_probs: Tensor, algorithm: AlgorithmConfig) -> Tensor:
        """Estimated divergence from the reference policy at each token, [n]; 0 without one."""
        if not len(micro.reference_log_probs):
            return torch.zeros_like(log_probs)
        return kl_penalty(log_probs, micro.reference_log_probs, algorithm.kl.estimator)

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
