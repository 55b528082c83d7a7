"""Check that one model says the same in all its forms: transformers, vLLM and Megatron, token by token.

    python tools/check_greedy.py --hf runs/exported --megatron runs/trained/state/step_000004

Answers a few prompts greedily in fp32 with transformers and with a vLLM server of the Hugging Face folder, and asks
the Megatron checkpoint, at every position of these answers, for its most likely token. Prints one JSON object; exit
code 1 where something differs.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.server import start_server, stop_server, wait_until_healthy
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.attention import pack
from dapo_megatron.trainer.build import ModelChunk, build_chunks, load_weights

PROMPTS = ("The capital of France is", "12 + 30 = 42\n21 + 47 = 68\n35 + 13 =", "def add(a, b):\n", "Once upon a time")
START_SECONDS = 300


class LogitsModel(ModelChunk):
    """A model on one rank that returns whole logits."""

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return hidden_states[:, 0] @ weight.T


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare the greedy answers of one model in three forms.")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="the same model for Megatron")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of each answer (default 24)")
    options = parser.parse_args()
    tokenizer = Tokenizer(options.hf)
    prompts = tokenizer.encode_prompts(PROMPTS)
    expected = with_transformers(options.hf, prompts, options.tokens)
    served = asyncio.run(with_vllm(options.hf, prompts, options.tokens))
    result: dict[str, Any] = {
        "texts": [tokenizer.decode(answer) for answer in expected],
        "tokens": sum(map(len, expected)),
        "vllm_differs_in": sum(a != b for a, b in zip(expected, served, strict=True)),
        "megatron_differs_in": with_megatron(options.megatron, prompts, expected),
    }
    result["agrees"] = not result["vllm_differs_in"] and not result["megatron_differs_in"]
    print(json.dumps(result, indent=2))
    return 0 if result["agrees"] else 1


@torch.no_grad()
def with_transformers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens for each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


async def with_vllm(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The same from a server."""
    token = secrets.token_hex(16)
    longest = max(map(len, prompts)) + count
    with tempfile.TemporaryDirectory(prefix="dapo-greedy-") as logs:
        server = start_server(
            model=str(folder),
            index=0,
            port=None,
            fleet=FleetConfig(dtype="float32", kv_cache_gb=0.25, max_num_seqs=len(prompts)),
            max_model_len=longest,
            seed=1,
            log_path=Path(logs) / "server.log",
            token=token,
        )
        try:
            wait_until_healthy(server, timeout=START_SECONDS)
            sampling = Sampling(count, temperature=0.0, ignore_eos=True)
            async with ServerClient(server.url, token, timeout=300) as client:
                answers = [await client.generate(prompt, sampling, f"greedy-{i}") for i, prompt in enumerate(prompts)]
        finally:
            stop_server(server)
    return [answer.token_ids.tolist() for answer in answers]


@torch.no_grad()
def with_megatron(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> int:
    """In how many places Megatron's most likely token is another than the answers'."""
    layout = ParallelConfig()
    parallel.initialize(layout, seed=1)
    training = TrainingConfig(precision="fp32", layer_backend="local")
    (model,) = build_chunks(LogitsModel, architecture_of(folder), layout, training)
    load_weights(model, open_weights(folder))
    model.eval()
    differing = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer])
        logits = model(ids, None, None, packed_seq_params=pack([ids.shape[1]], torch.device("cpu")))
        chosen = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        differing += sum(a != b for a, b in zip(chosen, answer, strict=True))
    return differing


if __name__ == "__main__":
    sys.exit(main())
