"""Check a run's exported model with transformers alone: the same accuracy, and the same log-probs as the policy.

    python tools/check_export.py examples/laptop/addition.yaml runs/quickstart

Answers the run's held-out prompts with transformers' own `generate`, grades them, and compares the accuracy with the
interval in summary.json. Then loads the exported weights into the Megatron policy in fp32 and compares the log-prob
of every generated token. Prints one JSON object; exit code 1 where something differs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.data.prompts import load_rows, tokenize
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.evaluation.statistics import accuracy_interval
from dapo_megatron.rollout.blocks import build_batch as flatten
from dapo_megatron.rollout.blocks import select
from dapo_megatron.rollout.grader import Grader
from dapo_megatron.rollout.requests import Generated
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.batching import load_batch
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response
from dapo_megatron.types import Group, Prompt

LIMIT = 1e-4  # of a log-prob, fp32
BATCH = 64


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check an exported model with transformers alone.")
    parser.add_argument("config", help="the run's YAML file")
    parser.add_argument("run_dir", type=Path, help="the run's folder, with hf/ and summary.json")
    options = parser.parse_args()
    folder = options.run_dir / "hf"
    overrides = [f"model.path={folder}", "training.precision=fp32", "evaluation.samples=1"]
    config = load_config(options.config, overrides)
    if config.evaluation.data is None:
        raise SystemExit("the config has no evaluation.data")
    tokenizer = Tokenizer(folder)
    prompts = tokenize(load_rows(config.evaluation.data), tokenizer, config.data.max_prompt_tokens).prompts
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    groups = answer(model, prompts, tokenizer, config)
    scores = [float(group.samples[0].correct) for group in groups]
    result: dict[str, Any] = {
        "accuracy": sum(scores) / len(scores),
        "interval": accuracy_interval(scores, config.evaluation.confidence),
        "policy_interval": json.loads((options.run_dir / "summary.json").read_text())["interval_after"],
        "largest_log_prob_difference": largest_difference(model, groups, config),
    }
    low, high = result["policy_interval"]
    result["agrees"] = low <= result["accuracy"] <= high and result["largest_log_prob_difference"] <= LIMIT
    print(json.dumps(result, indent=2))
    return 0 if result["agrees"] else 1


@torch.no_grad()
def answer(model: PreTrainedModel, prompts: Sequence[Prompt], tokenizer: Tokenizer, config: Config) -> list[Group]:
    """One sampled and graded answer per prompt."""
    torch.manual_seed(config.run.seed)
    rollout, ends = config.rollout, list(tokenizer.end_token_ids(config.rollout.stop))
    grader = Grader(tokenizer, config.data.reward, rollout.stop, config.algorithm.overlong, rollout.max_tokens)
    groups: list[Group] = []
    by_length = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    for length in sorted({len(prompt.token_ids) for prompt in by_length}):
        same = [prompt for prompt in by_length if len(prompt.token_ids) == length]
        for start in range(0, len(same), BATCH):
            part = same[start : start + BATCH]
            ids = torch.tensor([prompt.token_ids for prompt in part])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=config.evaluation.temperature,
                top_p=config.evaluation.top_p,
                top_k=0,
                max_new_tokens=config.generation_limit,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
            for prompt, row in zip(part, output[:, length:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                reason: Literal["stop", "length"] = "stop" if row[end - 1] in ends else "length"
                zeros = np.zeros(end, np.int32)
                generated = Generated(np.array(row[:end], np.int32), zeros.astype(np.float32), zeros, reason)
                groups.append(Group(len(groups), prompt, (grader.sample(generated, prompt),)))
    return groups


def largest_difference(model: PreTrainedModel, groups: Sequence[Group], config: Config) -> float:
    """Largest absolute difference of a token's log-prob between transformers and the Megatron policy."""
    policy = Policy(config, parallel.initialize(config.parallel, seed=1))
    header, tokens = flatten(0, groups, {}, {})
    rules = replace(policy.packing, mini_batch=header.num_responses)
    batch = load_batch(header, rules, policy.layout, lambda responses: select(header, tokens, responses))
    ours = gather_by_response(batch.micro_batches(), policy.log_probs(batch))
    worst = 0.0
    for r, group in enumerate(groups):
        response = group.samples[0].token_ids.tolist()
        ids = torch.tensor([[*group.prompt.token_ids, *response]])
        with torch.no_grad():
            logits = model(ids).logits[0, -len(response) - 1 : -1] / config.rollout.temperature
        theirs = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
        worst = max(worst, float((ours[r] - theirs).abs().max()))
    return worst


if __name__ == "__main__":
    sys.exit(main())
