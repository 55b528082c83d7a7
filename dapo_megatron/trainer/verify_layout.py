"""Law 1 on one layout, under torchrun: results of a random batch, stored or compared with those of another layout.

`python -m dapo_megatron.trainer.verify_layout JOB.json`, started by `dapo-megatron verify layout`.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.checkpoint.hf import HFReader, write_hf
from dapo_megatron.checkpoint.safetensors_file import Entry
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.table import hf_shapes
from dapo_megatron.processes import die_with_parent
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.batching import Batch, load_batch
from dapo_megatron.trainer.build import export_weights
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response
from dapo_megatron.trainer.trained import Metrics
from dapo_megatron.types import BatchHeader, Int16, TokenBlock

OLD_POLICY_NOISE = 0.25
"""Standard deviation of log r: some tokens' ratios are clipped, most are not."""
ROLLOUT_MEAN = -2.0  # of the log-probs that `random_rollouts` makes up, whose standard deviation is 1
SHORTEST_PROMPT = 5
END_GRACE = 10.0  # seconds a rank may take to end when its launcher has died


def layout_results(
    config: Config, *, fp64: bool, seed: int = 0
) -> tuple[Metrics, Iterator[tuple[str, Tensor]], list[Entry]]:
    """Log-probs, loss and gradients of one mini-batch of random responses in the layout of `config`.

    Args:
        config: model, layout, objective, and the batch's size.
        fp64: compute in double precision: what differs between layouts is then the layout and not rounding.
        seed: of the responses.

    Returns:
        Metrics of the mini-batch; (name, tensor) pairs: "log_probs/<response>" [n] and "grad/<Hugging Face name>",
        the main gradient, one parameter at a time; and their names, dtypes and shapes beforehand. The pairs are a
        collective over the ranks with `Layout.sends_weights`, each of which must consume them; there are none on the
        others.
    """
    policy = Policy(config, parallel.initialize(config.parallel, config.run.seed, config.training.threads))
    if fp64:
        compute_in_fp64(policy)
    batch = random_batch(policy, seed)
    log_probs = policy.log_probs(batch)
    batch.set_old_log_probs(nearby_log_probs(batch, log_probs))
    (mini_batch,) = batch.mini_batches()
    metrics = policy.gradients(mini_batch, force_all_reduce=True)
    every = gather_by_response(batch.micro_batches(), log_probs)
    if not policy.layout.sends_weights:
        return metrics, iter(()), []
    return metrics, _results(policy, every), _entries(policy, every)


def _entries(policy: Policy, log_probs: dict[int, Tensor]) -> list[Entry]:
    dtype = _main_grad(next(policy.chunks[0].parameters())).dtype
    responses = [Entry(f"log_probs/{i}", values.dtype, tuple(values.shape)) for i, values in sorted(log_probs.items())]
    return responses + [Entry(f"grad/{name}", dtype, shape) for name, shape in hf_shapes(policy.arch).items()]


def _results(policy: Policy, log_probs: dict[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for response, values in sorted(log_probs.items()):
        yield f"log_probs/{response}", values
    for name, gradient in export_weights(policy.chunks, _main_grad):
        yield f"grad/{name}", gradient


def _main_grad(parameter: torch.nn.Parameter) -> Tensor:
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def compare(tensors: Iterable[tuple[str, Tensor]], reference: Callable[[str], Tensor]) -> dict[str, float]:
    """||found - expected|| / ||expected|| by name; infinite where that is not a number.

    Tensors that are zero in both (an expert without tokens) are left out: their agreement says nothing.

    Raises:
        RuntimeError: if a tensor has not the shape of its reference, or none is left.
    """
    errors = {}
    for name, found in tensors:
        found, expected = found.cpu().double(), reference(name).double()
        if found.shape != expected.shape:
            raise RuntimeError(f"{name} has the shape {tuple(found.shape)}, the reference {tuple(expected.shape)}")
        if found.any() or expected.any():
            error = float((found - expected).norm() / expected.norm())
            errors[name] = math.inf if math.isnan(error) else error
    if not errors:
        raise RuntimeError("all tensors are zero: there is nothing to compare")
    return errors


def compute_in_fp64(policy: Policy) -> None:
    """Make the forward and backward passes fp64; the main gradients stay fp32. The policy can no longer be updated.

    Rounding alone may exceed the tolerance between layouts: the residual stream of SmolLM2-135M reaches 23,000, and
    its gradients in fp32 are off by 5e-5 of the exact ones on one rank already.
    """
    for chunk, ddp in zip(policy.chunks, policy.ddp, strict=True):
        for parameter in chunk.parameters():
            parameter.data = parameter.data.double()
            # Another dtype makes torch forget the hook by which megatron adds the gradient to the main gradient.
            parameter.register_post_accumulate_grad_hook(ddp._make_backward_post_hook(parameter))
        chunk.config.params_dtype = chunk.config.pipeline_dtype = torch.float64
        if chunk.config.moe_router_dtype is not None:
            chunk.config.moe_router_dtype = "fp64"


def random_batch(policy: Policy, seed: int = 0) -> Batch:
    """Random responses, planned and packed for this rank, with advantages. Old log-probs are the caller's to set."""
    rollout = policy.config.rollout
    header, tokens = random_rollouts(
        policy.arch.vocab_size,
        groups=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        max_prompt_tokens=policy.config.data.max_prompt_tokens,
        max_tokens=policy.config.generation_limit,
        seed=seed,
    )
    if policy.config.training.router_replay == "R3":
        tokens = replace(
            tokens, routes=random_routes(policy.arch, len(tokens.prompt_tokens) + len(tokens.response_tokens), seed)
        )
    batch = load_batch(header, policy.packing, policy.layout, lambda _: tokens)
    batch.set_advantages(group_advantages(torch.from_numpy(header.rewards), torch.from_numpy(header.groups)))
    return batch


def random_rollouts(
    vocab_size: int, *, groups: int, samples: int, max_prompt_tokens: int, max_tokens: int, seed: int
) -> tuple[BatchHeader, TokenBlock]:
    """A whole batch of random tokens, lengths and rewards; one response is empty.

    Args:
        vocab_size: tokens are below it.
        groups: number of groups.
        samples: responses in each.
        max_prompt_tokens: prompts have 5 tokens to this many.
        max_tokens: responses have up to this many.
        seed: of everything.
    """
    random = np.random.default_rng(seed)
    count = groups * samples
    group_ids = np.repeat(np.arange(groups), samples).astype(np.int32)
    prompt_lengths = random.integers(SHORTEST_PROMPT, max_prompt_tokens + 1, groups).astype(np.int32)
    lengths = random.integers(1, max_tokens + 1, count).astype(np.int32)
    lengths[min(3, count - 1)] = 0
    prompts = [random.integers(0, vocab_size, length) for length in prompt_lengths]
    responses = random.integers(0, vocab_size, int(lengths.sum()))
    rewards = random.choice([-1.0, 1.0], count).astype(np.float32)
    header = BatchHeader(
        step=0,
        groups=group_ids,
        draws=np.arange(groups, dtype=np.int32),
        prompt_ids=np.arange(groups, dtype=np.int32),
        prompt_lengths=prompt_lengths,
        response_lengths=lengths,
        rewards=rewards,
        correct=rewards > 0,
        truncated=np.zeros(count, bool),
    )
    block = TokenBlock(
        responses=np.arange(count, dtype=np.int32),
        prompt_lengths=prompt_lengths[group_ids],
        response_lengths=lengths,
        prompt_tokens=np.concatenate([prompts[g] for g in group_ids]).astype(np.int32),
        response_tokens=responses.astype(np.int32),
        rollout_log_probs=random.normal(ROLLOUT_MEAN, 1, int(lengths.sum())).astype(np.float32),
    )
    return header, block


def random_routes(arch: Architecture, tokens: int, seed: int) -> Int16:
    """Any experts for every token in every layer that has some, int16 [tokens, L, k]."""
    layers = sum(arch.has_experts(layer) for layer in range(arch.num_layers))
    order = np.random.default_rng(seed).random((tokens, layers, arch.num_experts)).argsort(-1)
    return order[..., : arch.experts_per_token].astype(np.int16)


def nearby_log_probs(batch: Batch, log_probs: list[Tensor]) -> list[Tensor]:
    """Old log-probs around `log_probs`, per micro-batch of this rank: the same difference for a token in every layout.

    What is added is made from the made-up log-probs of the engine, which travel with each token.
    """
    return [
        own + OLD_POLICY_NOISE * (micro.rollout_log_probs - ROLLOUT_MEAN).to(own) if len(own) else own
        for micro, own in zip(batch.micro_batches(), log_probs, strict=True)
    ]


def run_job(job: dict[str, Any]) -> None:
    """Store the results of a layout in job["reference"], or compare them with those there.

    They are stored as a checkpoint, so that neither writing nor comparing holds all gradients at once.
    """
    config = Config.model_validate(job["config"])
    metrics, tensors, entries = layout_results(config, fp64=job["fp64"])
    outcome: dict[str, Any] = {"metrics": metrics}
    if dist.get_rank() == 0 and job["is_reference"]:
        write_hf(job["reference"], config.model.path, tensors, entries)
    elif dist.get_rank() == 0:
        outcome["errors"] = compare(tensors, HFReader(job["reference"]))
    for _ in tensors:  # the other ranks take part in the gathering of each parameter
        pass
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(outcome))


def main() -> NoReturn:
    """Entry of every rank: exit code 0, 2 for a user error, 1 for anything else."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid(), END_GRACE)
    try:
        run_job(json.loads(Path(sys.argv[1]).read_text()))
    except UserError as error:  # every rank raises it; one tells
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"dapo-megatron: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
