"""Random rollout batches and the config around them, for tests of the trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_megatron.config.run import Config
from dapo_megatron.trainer.verify_layout import random_batch as load_batch
from dapo_megatron.trainer.verify_layout import random_rollouts
from dapo_megatron.types import BatchHeader, TokenBlock

__all__ = ["load_batch", "make_batch", "make_config", "partly_old", "rows_of"]

PROMPT_TOKENS, RESPONSE_TOKENS = 24, 12


def make_config(model: Path | str, **sections: dict[str, Any]) -> Config:
    """A config for batches of 4 groups of 4 responses of up to 12 tokens, in fp32."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "steps": 1},
        "model": {"path": str(model)},
        "data": {"train": {"arithmetic": {}}, "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": RESPONSE_TOKENS},
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


def make_batch(vocab: int, groups: int = 4, samples: int = 4, seed: int = 0) -> tuple[BatchHeader, TokenBlock]:
    """The whole batch of which `load_batch` takes a rank's share, for a model with `vocab` tokens."""
    return random_rollouts(
        vocab, groups=groups, samples=samples, max_prompt_tokens=PROMPT_TOKENS, max_tokens=RESPONSE_TOKENS, seed=seed
    )


def partly_old(header: BatchHeader, old: NDArray[Any]) -> BatchHeader:
    """The header when the first `old` tokens of each response, integer [R], are of version 0, the others of 1."""
    lengths = np.stack([old, header.response_lengths - old], 1).astype(np.int32).ravel()
    there = lengths > 0
    return replace(
        header,
        run_responses=np.repeat(np.arange(len(old), dtype=np.int32), 2)[there],
        run_versions=np.tile(np.array([0, 1], np.int32), len(old))[there],
        run_lengths=lengths[there],
    )


def rows_of(tokens: TokenBlock) -> dict[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Prompt tokens, response tokens and rollout log-probs of each response."""
    prompts = np.split(tokens.prompt_tokens, np.cumsum(tokens.prompt_lengths)[:-1])
    ends = np.cumsum(tokens.response_lengths)[:-1]
    responses, log_probs = np.split(tokens.response_tokens, ends), np.split(tokens.rollout_log_probs, ends)
    return {int(r): (prompts[i], responses[i], log_probs[i]) for i, r in enumerate(tokens.responses)}
