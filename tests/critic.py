"""A critic's batches, with values that are not 0 and returns around them."""

import torch
from torch import Tensor

from dapo_megatron.trainer.batching import Batch, PackingRules, load_batch
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.verify_layout import random_rollouts

HEAD_SCALE = 0.1  # of a normalised hidden state of 64 numbers: values have a standard deviation near 1


def critic_batch(critic: Critic, seed: int = 0, *, truncated: bool = False) -> Batch:
    """Random responses, packed as the policy's; all cut off where they are `truncated`."""
    config, rollout = critic.config, critic.config.rollout
    header, tokens = random_rollouts(
        critic.arch.vocab_size,
        groups=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=rollout.max_tokens,
        seed=seed,
    )
    header.truncated[:] = truncated
    return load_batch(header, PackingRules.of(config, critic.arch, critic.layout), critic.layout, lambda _: tokens)


def head_of(critic: Critic) -> torch.nn.Parameter | None:
    """The value head's weight, on the last pipeline stage."""
    last = critic.chunks[-1]
    weight: torch.nn.Parameter | None = last.output_layer.weight if last.post_process else None
    return weight


@torch.no_grad()
def set_head(critic: Critic, seed: int = 0) -> None:
    """Random numbers in the head, the same on all ranks that have it."""
    head = head_of(critic)
    if head is not None:
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)) * HEAD_SCALE)
    critic.optimizer.reload_model_params()  # its masters


def set_targets(batch: Batch, values: list[Tensor], seed: int = 0) -> None:
    """Old values and returns around `values`, the same for a token in every layout."""
    noise = torch.randn(2, int(batch.header.response_lengths.sum()), generator=torch.Generator().manual_seed(seed))
    for micro, own in zip(batch.micro_batches(), values, strict=True):
        if len(own):
            old, returns = noise[:, batch.token_index(micro)]
            micro.old_values, micro.returns = own + 0.5 * old, own + returns
