"""A tiny Llama that has read imperfect solutions of chain sums: the start of all runs of the ablation.

A third of a million parameters, a number a token, trained for a minute or two. Its demonstrations (train split) are as
those of a base model are: now and then a total is wrong, and some solutions get stuck at a total and repeat it without
an end. And it is stopped early. So most questions are answered rightly in some samples and wrongly in others, and some
answers are cut off: every part of DAPO has something to act on.

    python -m examples.ablation.make_model models/chain-sum-tiny
"""

import argparse
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dapo_megatron.config.data import ArithmeticConfig
from dapo_megatron.data.arithmetic import generate

SEED = 0  # of the weights, the problems and the mistakes
TERMS = 8  # the most numbers in one problem, as in base.yaml
PROBLEMS = 20_000
STEPS, BATCH = 900, 64
LR, WARMUP = 2e-3, 50
SLIP = 0.03  # probability that a total is off by up to three
LOOP = 0.03  # probability that a total is repeated without an end once it is written
LENGTH = 40  # tokens of a demonstration at most; loops fill them, beyond rollout.max_tokens
IGNORED = -100  # label without a loss

# "3 + 9 + 4 = 12 16\n" is 7 tokens: the k-th number of a question is its k-th token, and a total is one token.
PIECES = Regex(r"( \+)? ?\d+| =|\n")
TOKENS = [*map(str, range(1, 10)), *(f" + {digit}" for digit in range(1, 10)), " =", "\n"]
TOTALS = [f" {total}" for total in range(9 * TERMS + 3 * TERMS)]
END, PAD = "<|end|>", "<|pad|>"
VOCABULARY = {token: index for index, token in enumerate([*TOKENS, *TOTALS, END, PAD])}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A number, with the space and the plus before it, is one token."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(PIECES, "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END, PAD])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)


def make_model(seed: int) -> LlamaForCausalLM:
    """Random weights, fp32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=VOCABULARY[END],
            pad_token_id=VOCABULARY[PAD],
        )
    )


def solution(numbers: Sequence[int], rng: random.Random) -> list[str]:
    """The tokens of an imperfect solution. What follows a wrong total is counted from it."""
    tokens: list[str] = []
    total = numbers[0]
    for number in numbers[1:]:
        total += number
        if rng.random() < SLIP:
            total = max(0, total + rng.choice((-3, -2, -1, 1, 2, 3)))
        tokens.append(f" {total}")
        if rng.random() < LOOP:
            return tokens + tokens[-1:] * LENGTH
    return [*tokens, "\n"]


def demonstrations(problems: Sequence[Sequence[int]], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [B, LENGTH]: only solutions have labels, questions and padding do not."""
    ids = torch.full((len(problems), LENGTH), VOCABULARY[PAD])
    labels = torch.full_like(ids, IGNORED)
    for row, numbers in enumerate(problems):
        question = [str(numbers[0]), *(f" + {number}" for number in numbers[1:]), " ="]
        tokens = torch.tensor([VOCABULARY[token] for token in question + solution(numbers, rng)][:LENGTH])
        ids[row, : len(tokens)] = tokens
        labels[row, len(question) : len(tokens)] = tokens[len(question) :]
    return ids, labels


def read_problems(seed: int) -> list[list[int]]:
    """The numbers of training problems."""
    config = ArithmeticConfig(task="chain_sum", split="train", problems=PROBLEMS, shots=0, terms=TERMS, seed=seed)
    return [[int(number) for number in str(row.prompt).removesuffix(" =").split(" + ")] for row in generate(config)]


def train(model: LlamaForCausalLM, steps: int, seed: int) -> None:
    """`steps` updates on fresh demonstrations; the loss is printed every hundred."""
    rng, problems = random.Random(seed), read_problems(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step in range(1, steps + 1):
        ids, labels = demonstrations(rng.sample(problems, BATCH), rng)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}: loss {loss.item():.3f}", flush=True)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Written beside and renamed, so that a folder that exists is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[END], pad_token_id=VOCABULARY[PAD])
    model.save_pretrained(unfinished)
    make_tokenizer().save_pretrained(unfinished)
    os.replace(unfinished, folder)


def main() -> None:
    """Make the model, unless the folder is there already."""
    parser = argparse.ArgumentParser(description="Make the tiny model of the ablation.")
    parser.add_argument("folder", type=Path, help="where to write it, for example models/chain-sum-tiny")
    folder: Path = parser.parse_args().folder
    if folder.exists():
        print(f"{folder} is there already")
        return
    torch.set_num_threads(1)  # a fixed number, so that every machine adds in the same order
    model = make_model(SEED)
    train(model, STEPS, SEED)
    save(model, folder)
    print(f"wrote {folder}: {sum(parameter.numel() for parameter in model.parameters())} parameters")


if __name__ == "__main__":
    main()
