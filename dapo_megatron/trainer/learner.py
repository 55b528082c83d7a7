"""Everything that learns or is learned from on the trainer's side: the policy, and what an objective sets beside it."""

from collections.abc import Sequence

import torch.distributed as dist

from dapo_megatron.config.run import Config
from dapo_megatron.models.flops import forward_flops, training_flops
from dapo_megatron.trainer.advantages import set_advantages
from dapo_megatron.trainer.batching import Batch, MiniBatch, input_lengths
from dapo_megatron.trainer.colocated import give_memory, shares_gpus
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy, combine
from dapo_megatron.trainer.reference import Reference
from dapo_megatron.trainer.trained import Metrics, TrainedModel


class Learner:
    """The policy, its frozen reference where there is a KL term (or DPO), its critic where the estimator is gae."""

    def __init__(self, config: Config, layout: Layout) -> None:
        algorithm = config.algorithm
        self.config, self.layout = config, layout
        self.policy = Policy(config, layout)
        self.reference = Reference(config, layout) if algorithm.has_reference else None
        self.critic = Critic(config, layout) if algorithm.has_critic else None

    @property
    def models(self) -> list[TrainedModel]:
        """What is trained: policy and critic."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def prepare(self, batch: Batch) -> Metrics:
        """Score the batch with the weights of the step's start, and give its tokens their advantages."""
        batch.set_old_log_probs(self.policy.old_log_probs(batch))
        if self.reference is not None:
            batch.set_reference_log_probs(self.reference.log_probs(batch))
        if self.critic is not None:
            batch.set_old_values(self.critic.values(batch))
        return set_advantages(batch, self.layout, self.config.algorithm) | {"flops/trained": self._flops(batch)}

    def start_step(self) -> None:
        """Advance the schedules: once per rollout step, for all its updates."""
        self.policy.start_step()
        if self.critic is not None:
            self.critic.start_step()

    def update(self, mini_batch: MiniBatch) -> Metrics:
        """One update of the policy, and of the critic, on a mini-batch. Metrics over the whole mini-batch."""
        critic = self.critic.update(mini_batch) if self.critic is not None else {}
        return self.policy.update(mini_batch) | critic

    def finish_step(self) -> None:
        """The step's updates are over: servers on the same GPUs, if there are any, get the memory that only these need.

        Before the push: there a server that died meanwhile is started again.
        """
        if shares_gpus(self.config):
            give_memory(self.models)
            dist.barrier()  # a server that starts may need every rank's memory

    def combine(self, updates: Sequence[Metrics]) -> Metrics:
        """Metrics of a step from those of its updates."""
        return combine(updates, recomputed=self.config.algorithm.old_log_probs == "recompute")

    def _flops(self, batch: Batch) -> float:
        """Operations of a step's passes over its batch: old log-probs, reference, critic, and the updates."""
        lengths, targets = input_lengths(batch.header), batch.header.response_lengths
        recompute = self.config.training.recompute == "full"
        trained = [self.policy.arch] + ([self.critic.arch] if self.critic is not None else [])
        scored = trained if self.config.algorithm.old_log_probs == "recompute" else trained[1:]
        if self.reference is not None:
            scored = [*scored, self.reference.arch]
        forward = sum(forward_flops(arch, lengths, targets=targets) for arch in scored)
        return forward + sum(training_flops(arch, lengths, targets=targets, recompute=recompute) for arch in trained)
