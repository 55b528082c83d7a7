"""Training on made-up rollouts, and everything that it changes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dapo_megatron.run_state.checkpoint import RunState
from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.trained import TrainedModel
from tests.batches import load_batch
from tests.critic import set_targets


def train(policy: Policy, state: RunState, steps: int, critic: Critic | None = None) -> None:
    """Steps on batches that depend on the step alone, as given rollouts would."""
    for _ in range(steps):
        batch = load_batch(policy, seed=state.step)
        batch.set_old_log_probs(policy.log_probs(batch))
        policy.start_step()
        for mini_batch in batch.mini_batches():
            policy.update(mini_batch)
        if critic is not None:
            train_critic(critic, batch)
        state.finish_step({"position": state.step + 1}, state.version + 1)


def train_critic(critic: Critic, batch: Batch) -> None:
    """A step of the critic, towards returns around its values."""
    set_targets(batch, critic.values(batch))
    critic.start_step()
    for mini_batch in batch.mini_batches():
        critic.update(mini_batch)


def tensors(model: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Everything on this rank that an update reads or changes."""
    for i, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            yield f"chunk {i} {name}", parameter
    for i, inner in enumerate(inner_optimizers(model.optimizer)):
        for group in inner.param_groups:
            yield f"learning rate {i}", torch.tensor(group["lr"])
            for j, parameter in enumerate(group["params"]):
                yield f"master {i} {j}", parameter
                for name, value in inner.state[parameter].items():
                    yield f"{name} {i} {j}", value


def differing(found: TrainedModel, expected: TrainedModel) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    ours, theirs = dict(tensors(found)), dict(tensors(expected))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("exp_avg_sq") for name in ours)
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
