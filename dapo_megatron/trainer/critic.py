"""PPO's critic: values of a batch's tokens, and one optimizer update from a mini-batch."""

import math
from functools import partial

import torch
from torch import Tensor

from dapo_megatron.algorithm.aggregation import aggregate
from dapo_megatron.algorithm.value_loss import value_loss
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.critic_view import critic_config, critic_keys
from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.run import Config
from dapo_megatron.errors import renamed_keys
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.trainer.batching import Batch, MicroBatch, MiniBatch
from dapo_megatron.trainer.build import build_value_model, load_weights
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.precision import check_machine
from dapo_megatron.trainer.trained import Metrics, TrainedModel, means, outputs_of

MEANS = ("value", "clip")  # over the tokens of a mini-batch
# Sums over them, of which the explained variance is made: R, R^2, R - V_old, (R - V_old)^2.
MOMENTS = ("returns", "returns_squared", "errors", "errors_squared")
ROUNDING = 1e-12  # of a mean square: what is left of the variance of equal numbers, in fp64


class Critic(TrainedModel):
    """A Megatron model with a value head, its optimizer and its schedule, in the layout and precision of the policy.

    It starts from the checkpoint `critic.path`, or the policy's, with values of 0. It takes the micro-batches that were
    packed for the policy.

    Args:
        config: the run's configuration.
        layout: this rank's place in it.

    Raises:
        UserError: if the model, the layout, the precision and this machine do not fit together.
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        own = critic_config(config)
        with renamed_keys(critic_keys(config)):
            self.arch = architecture_of(own.model.path)
            check_precision(self.arch, own.training, own.optimizer, own.parallel, model=own.model.path)
            check_machine(own.training, own.optimizer, own.parallel)
            chunks = build_value_model(self.arch, own.parallel, own.training)
            reader = open_weights(own.model.path)
            masters = [load_weights(chunk, reader) for chunk in chunks]
        super().__init__(config, layout, chunks, masters, own.optimizer)

    def values(self, batch: Batch) -> list[Tensor]:
        """V_t of the state in which each response token is chosen, per micro-batch of this rank.

        Returns:
            fp32 [n] tensors; empty ones on all but the last pipeline stage.
        """
        return outputs_of(self.ddp, batch.micro_batches(), lambda values: values)

    def update(self, mini_batch: MiniBatch) -> Metrics:
        """One optimizer step on a mini-batch. Returns metrics over the whole mini-batch, the same on every rank.

        Raises:
            RuntimeError: if a gradient is not finite, see `TrainedModel.apply_gradients`.
        """
        metrics = self.gradients(mini_batch) | self.apply_gradients(mini_batch)
        return {f"critic/{name}": value for name, value in metrics.items()}

    def gradients(self, mini_batch: MiniBatch, *, force_all_reduce: bool = False) -> Metrics:
        """Fill the main gradients with those of the mini-batch's loss; metrics over all its tokens.

        `loss` is the mean over all tokens, `value` that of the values, `clip` the share of tokens whose loss the clip
        holds, and `explained_variance` is 1 - Var(R - V_old) / Var(R), NaN where all returns are equal.

        Args:
            mini_batch: this rank's micro-batches.
            force_all_reduce: leave the whole reduced gradient on every rank, not only the rank's share.
        """
        stored = self.backward(mini_batch, partial(self._loss, mini_batch), force_all_reduce=force_all_reduce)
        values = self.reduce(stored, ("loss", *MEANS, *MOMENTS))
        averages = means({name: values[name] for name in (*MEANS, *MOMENTS)}, mini_batch.num_tokens)
        return {
            "loss": values["loss"],
            **{name: averages[name] for name in MEANS},
            "explained_variance": _explained_variance(*(averages[name] for name in MOMENTS)),
        }

    def _loss(self, mini_batch: MiniBatch, micro: MicroBatch, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, tokens, metrics [1 + MEANS + MOMENTS]) of one micro-batch, as `TrainedModel.backward` wants them."""
        mask = torch.ones_like(values, dtype=torch.bool)
        losses, clipped = value_loss(values, micro.old_values, micro.returns, mask, self.config.critic.value_clip)
        loss = aggregate(losses, mask, micro.responses, "token_mean", num_tokens=mini_batch.num_tokens)
        with torch.no_grad():
            returns, errors = micro.returns.double(), micro.returns.double() - micro.old_values.double()
            sums = (values, clipped, returns, returns.square(), errors, errors.square())
            stored = torch.stack([loss.double()] + [column.double().sum() for column in sums])
        # A micro-batch without tokens still takes part in the backward pass.
        total = loss * mini_batch.num_tokens if len(values) else values.sum() * 0.0
        return total, torch.tensor(len(values), dtype=torch.int, device=values.device), stored


def _explained_variance(returns: float, returns_squared: float, errors: float, errors_squared: float) -> float:
    """1 - Var(R - V_old) / Var(R) from means of R, R^2, R - V_old and its square."""
    variance = returns_squared - returns**2
    if variance <= ROUNDING * returns_squared:
        return math.nan
    return 1 - (errors_squared - errors**2) / variance
