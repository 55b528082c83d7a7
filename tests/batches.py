"""Random rollout batches and the config around them, for tests of the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.config.run import Config
from dapo_megatron.trainer.batching import Batch, build_batch, plan_batch
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.types import BatchHeader, TokenBlock
from tests.models import REPOSITORY


def make_config(model: Path | str, **sections: dict[str, Any]) -> Config:
    """A config for batches of 4 groups of 4 responses of up to 12 tokens, in fp32."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "steps": 1},
        "model": {"path": str(model)},
        "data": {"train": {"arithmetic": {}}, "max_prompt_tokens": 24},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 12},
        "training": {
            "mini_batch": 16,
            "micro_batch_tokens": 96,
            "precision": "fp32",
            "log_prob_chunk": 7,
            "threads": 1,
        },
        "optimizer": {"lr": 1e-3, "warmup_steps": 0},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return Config.model_validate(base)


def make_batch(
    stream: NDArray[np.int64], groups: int = 4, samples: int = 4, seed: int = 0
) -> tuple[BatchHeader, TokenBlock]:
    """Prompts of 5 to 23 tokens and responses of 0 to 12 (exactly one is empty), cut from `stream`; random rewards."""
    random = np.random.default_rng(seed)
    group_ids = np.repeat(np.arange(groups), samples).astype(np.int32)
    prompt_lengths = random.integers(5, 24, groups).astype(np.int32)
    lengths = random.integers(1, 13, groups * samples).astype(np.int32)
    lengths[3] = 0
    pieces = [stream[start : start + n] for n, start in _cuts(random, len(stream), [*prompt_lengths, *lengths])]
    prompts, responses = pieces[:groups], pieces[groups:]
    rewards = random.choice([-1.0, 1.0], groups * samples).astype(np.float32)
    count = groups * samples
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
        versions=np.zeros((count, 2), np.int32),
    )
    block = TokenBlock(
        responses=np.arange(count, dtype=np.int32),
        prompt_lengths=prompt_lengths[group_ids],
        response_lengths=lengths,
        prompt_tokens=np.concatenate([prompts[g] for g in group_ids]).astype(np.int32),
        response_tokens=np.concatenate(responses).astype(np.int32),
        rollout_log_probs=random.normal(-2, 1, int(lengths.sum())).astype(np.float32),
    )
    return header, block


def rows_of(tokens: TokenBlock) -> dict[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Prompt tokens, response tokens and rollout log-probs of each response."""
    prompts = np.split(tokens.prompt_tokens, np.cumsum(tokens.prompt_lengths)[:-1])
    ends = np.cumsum(tokens.response_lengths)[:-1]
    responses, log_probs = np.split(tokens.response_tokens, ends), np.split(tokens.rollout_log_probs, ends)
    return {int(r): (prompts[i], responses[i], log_probs[i]) for i, r in enumerate(tokens.responses)}


def _cuts(random: np.random.Generator, total: int, lengths: list[int]) -> list[tuple[int, int]]:
    return [(int(n), int(random.integers(0, total - n))) for n in lengths]


def token_stream(model: Path | str, vocab: int) -> NDArray[np.int64]:
    """Tokens to cut batches from: English text where the model has a tokenizer, random ones otherwise."""
    if not (Path(model) / "tokenizer.json").exists():
        return np.random.default_rng(7).integers(0, vocab, 2000)
    text = (REPOSITORY / "LICENSE").read_text()[:12000]
    return np.array(Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(text).ids, np.int64)


def old_log_probs(header: BatchHeader, log_probs: dict[int, torch.Tensor], seed: int = 1) -> dict[int, torch.Tensor]:
    """Old log-probs near the policy's, so that some tokens are clipped and most are not."""
    random = torch.Generator().manual_seed(seed)
    return {r: lp + 0.25 * torch.randn(lp.shape, generator=random) for r, lp in sorted(log_probs.items())}


def load_batch(policy: Policy, seed: int = 0) -> Batch:
    """A random batch, planned and packed for this rank, with its advantages. Old log-probs are the caller's to set."""
    header, tokens = make_batch(token_stream(policy.config.model.path, policy.arch.vocab_size), seed=seed)
    training, layout = policy.config.training, policy.layout
    plans = plan_batch(
        header,
        mini_batch=training.mini_batch,
        data_ranks=layout.data,
        micro_batch_tokens=training.micro_batch_tokens,
    )
    batch = build_batch(header, plans, tokens, data_rank=layout.data_rank, device=torch.device("cpu"))
    batch.set_advantages(group_advantages(torch.from_numpy(header.rewards), torch.from_numpy(header.groups)))
    return batch
