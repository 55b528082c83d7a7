"""What it costs to turn a training batch of vLLM's replies into arrays: processor time and memory.

    python -m benchmarks.rollout_replay [--answers 8192] [--tokens 5000] [--servers 16] [--in-flight 512]
                                        [--model FOLDER]

A server, which is not counted, replays the messages that vLLM 0.32 sent to the contract tests, other tokens in them, as
many as it is asked for. They come through everything that a run has between sockets and batch: client, checks, grading
(decoding the text included) in worker processes, one for every 8 servers, then frames to the controller and
`build_batch`. Printed are the seconds of user and system time of controller and workers, the sum of their largest
resident memories, and the time relative to `json.loads` and `orjson.loads` of the same bytes alone.

FOLDER has the model whose tokenizer is used; without it a vocabulary of 50,000 made-up words.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import tokenizers
import yaml

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.rollout.blocks import BatchTokens, build_batch
from dapo_megatron.rollout.requests import AnswerTask, Sampling, Server
from dapo_megatron.rollout.worker import open_engine
from dapo_megatron.types import BatchHeader, Group, Prompt, Sample

RECORDED = Path(__file__).parents[1] / "tests" / "contract" / "0.32.0" / "stream.sse"
WORDS = 50_000
VARIANTS = 64
"""Different messages; an answer is a random sequence of them."""

PROMPT_TOKENS = 200
GROUP = 16


class Replies:
    """Messages in vLLM's own words, as chunks of HTTP, with `interval` tokens each."""

    def __init__(self, vocabulary: int, interval: int) -> None:
        lines = [line[6:] for line in RECORDED.read_bytes().splitlines() if line.startswith(b"data: {")]
        self._message, self._last = orjson.loads(lines[1]), orjson.loads(lines[-1])
        self._interval = interval
        self._rng = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._variants = [self._chunk(self._message, interval) for _ in range(VARIANTS)]

    def answer(self, tokens: int) -> list[bytes]:
        """The chunks of an answer."""
        self._last["choices"][0]["weight_versions"][0]["end"] = tokens
        rest = (tokens - 1) % self._interval + 1
        last = self._chunk(self._last, rest)
        return [
            *random.choices(self._variants, k=(tokens - rest) // self._interval),
            last,
            b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
        ]

    def _chunk(self, template: dict[str, Any], tokens: int) -> bytes:
        ids = self._rng.integers(0, self._vocabulary, tokens).tolist()
        log_probs = (-self._rng.exponential(0.5, tokens)).astype(np.float32).astype(float).tolist()
        choice = template["choices"][0]
        choice["token_ids"] = ids
        entry = choice["logprobs"]["content"][0]
        choice["logprobs"]["content"] = [
            entry | {"token_id": i, "logprob": p, "top_logprobs": [{"token_id": i, "logprob": p, "rank": 1}]}
            for i, p in zip(ids, log_probs, strict=True)
        ]
        body = b"data: " + orjson.dumps(template) + b"\n\n"
        return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def serve(vocabulary: int, interval: int, pipe: Connection) -> None:
    """Be the server, on a port that it sends through `pipe`."""
    replies = Replies(vocabulary, interval)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                body = orjson.loads(await reader.readexactly(length))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for chunk in replies.answer(body["sampling_params"]["max_tokens"]):
                    writer.write(chunk)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def make_model(folder: Path) -> None:
    """A model folder with a vocabulary of made-up words."""
    rng = random.Random(0)
    words = {" " + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 7))) for _ in range(2 * WORDS)}
    vocabulary = {word: i for i, word in enumerate(sorted(words)[:WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    shape |= {"vocab_size": len(vocabulary), "max_position_embeddings": 2**20}
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5} | shape)
    )


def make_config(folder: Path, model: Path, tokens: int, servers: int) -> Config:
    """A configuration of which only what an engine reads matters."""
    values = {
        "run": {"dir": str(folder), "steps": 1},
        "model": {"path": str(model)},
        "data": {"train": {"arithmetic": {"task": "addition", "problems": 1}}},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": GROUP, "max_tokens": tokens},
        "algorithm": {"overlong": {"cache_tokens": 0}},
        "fleet": {"servers": servers},
        "training": {"mini_batch": GROUP, "micro_batch_tokens": 2**20},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "config.yaml", [])


async def replay(config: Config, url: str, args: argparse.Namespace) -> tuple[BatchHeader, BatchTokens, int]:
    """Receive all answers and build their batch. Returns it, and the workers' bytes of memory at their largest."""
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(i, tuple(rng.integers(0, vocabulary, PROMPT_TOKENS).tolist()), "42")
        for i in range(-(-args.answers // GROUP))
    ]
    servers = [Server(str(i), url, "token") for i in range(args.servers)]
    slots = asyncio.Semaphore(args.in_flight)
    async with open_engine(config) as engine:

        async def answer(number: int) -> Sample:
            async with slots:
                prompt = prompts[number // GROUP]
                task = AnswerTask(f"replay-{number}", prompt, Sampling(args.tokens))
                return await engine.answer(servers[number // GROUP % len(servers)], task, lambda count: None)

        samples = await asyncio.gather(*map(answer, range(args.answers)))
        groups = [Group(i, prompt, tuple(samples[i * GROUP : (i + 1) * GROUP])) for i, prompt in enumerate(prompts)]
        header, tokens = build_batch(1, groups, {}, {})
        return header, tokens, sum(map(largest_memory, worker_pids()))


def worker_pids() -> list[int]:
    """The processes of the engine."""
    children = psutil.Process().children()
    return [child.pid for child in children if "dapo_megatron.rollout.worker_process" in child.cmdline()]


def largest_memory(pid: int) -> int:
    """Most resident bytes that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def used_seconds() -> float:
    """User and system time of this process and of those it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def parse_rate(replies: Replies, loads: Callable[[bytes], object]) -> tuple[float, int]:
    """Seconds that `loads` takes for all different messages, and their bytes."""
    messages = [chunk.split(b"data: ")[1].rstrip() for chunk in replies._variants]
    started = time.process_time()
    for message in messages * 4:
        loads(message)
    return (time.process_time() - started) / 4, sum(map(len, messages))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--servers", type=int, default=16, help="what is counted as one; all have the same address")
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--interval", type=int, default=64, help="tokens of a message (fleet.stream_interval)")
    parser.add_argument("--model", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model is None:
            make_model(folder)
        config = make_config(folder, args.model or folder, args.tokens, args.servers)
        measure(config, args)


def measure(config: Config, args: argparse.Namespace) -> None:
    """Start the server, replay, and print."""
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text())["vocab_size"]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(vocabulary, args.interval, theirs), daemon=True
    )
    process.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        before, started = used_seconds(), time.monotonic()
        header, tokens, workers_memory = asyncio.run(replay(config, url, args))
        seconds, wall = used_seconds() - before, time.monotonic() - started
    finally:
        process.terminate()
    assert len(tokens.response_tokens) == args.answers * args.tokens == int(header.response_lengths.sum())
    replies = Replies(vocabulary, args.interval)
    memory = workers_memory + largest_memory(os.getpid())
    millions = args.answers * args.tokens / 1e6
    print(f"{args.answers} answers of {args.tokens} tokens: {seconds:.1f} CPU-seconds, {memory / 1e9:.2f} GB")
    print(f"({seconds / millions:.2f} CPU-seconds per million tokens; {wall:.1f} s went by)")
    for name, loads in (("json.loads", json.loads), ("orjson.loads", orjson.loads)):
        parsing, size = parse_rate(replies, loads)
        whole = parsing * args.answers * args.tokens / (VARIANTS * args.interval)
        of_token = size / (VARIANTS * args.interval)
        print(f"{name} of the same {of_token:.0f} bytes a token: {whole:.1f} s, {seconds / whole:.2f}x")


if __name__ == "__main__":
    main()
