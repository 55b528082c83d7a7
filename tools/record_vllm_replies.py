"""Record what a vLLM server replies on every route this package uses, for the contract tests.

    DAPO_SERVER_TOKEN=... python tools/record_vllm_replies.py http://127.0.0.1:8000 --to tests/contract

The server must be idle, and started as `dapo-megatron serve` does it, with a small model: token ids up to 99 are sent.
Writes a folder named after the server's version: `name.json` with HTTP status and reply, `name.sse` with a stream.
"""

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dapo_megatron.rollout import vllm_api
from dapo_megatron.rollout.middleware import TOKEN_VARIABLE
from dapo_megatron.rollout.requests import Sampling

PROMPT = tuple(range(40, 100))
VOCABULARY = 100  # of what is sent; answers may hold any id of the model
TOO_LONG = 2**18  # tokens, more than any server here can take
SHORT = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
TIMEOUT = 120.0  # seconds
ATTEMPTS = 10  # to step in before an answer is complete

CALLS = (
    ("models", "GET", vllm_api.MODELS, None),
    ("version", "GET", vllm_api.VERSION, None),
    ("weight_info", "GET", vllm_api.WEIGHT_INFO, None),
    ("world_size", "GET", vllm_api.WORLD_SIZE, None),
    ("is_paused", "GET", vllm_api.IS_PAUSED, None),
    ("reset_prefix_cache", "POST", vllm_api.reset_prefix_cache_path(running=False), None),
    ("rpc", "POST", vllm_api.COLLECTIVE_RPC, vllm_api.rpc_body("check_health")),
    ("rpc_unknown", "POST", vllm_api.COLLECTIVE_RPC, vllm_api.rpc_body("no_such_method")),
    ("no_such_route", "GET", "/no_such_route", None),
    ("sleep", "POST", vllm_api.sleep_path(1), None),
    ("wake_up", "POST", vllm_api.wake_up_path(), None),
)


@dataclass(frozen=True)
class Reply:
    """HTTP status, and decoded JSON or the text of a stream."""

    status: int
    body: Any


class Recorder:
    """Calls the routes of one server and keeps the replies by name, without the model's own, which is a path."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self.replies: dict[str, Reply] = {}

    async def call(self, name: str, method: str, path: str, body: dict[str, Any] | None) -> None:
        """One request with an ordinary reply."""
        reply = await self._client.request(method, path, json=body)
        decoded = json.loads(reply.text.replace(self._model, "model")) if reply.content else None
        self.replies[name] = Reply(reply.status_code, decoded)

    async def stream(self, name: str, body: dict[str, Any]) -> AsyncIterator[None]:
        """One streamed request; comes back after each line, so that the caller can step in between."""
        lines: list[str] = []
        async with self._client.stream("POST", vllm_api.GENERATE, json=body) as reply:
            async for line in reply.aiter_lines():
                lines.append(line)
                yield
        self.replies[name] = Reply(reply.status_code, "\n".join(lines) + "\n")


def body(name: str, sampling: Sampling, prompt: tuple[int, ...] = PROMPT, *, stream: bool = False) -> dict[str, Any]:
    """Request `name` as the rollout controller sends it."""
    return vllm_api.generate_body(prompt, sampling, name, vocabulary=VOCABULARY, cache_salt="0", stream=stream)


async def record(url: str, token: str) -> dict[str, Reply]:
    """The replies of the server at `url`, by name. It is left as it was."""
    headers = {"Authorization": f"Bearer {token}"}
    # No connection is used twice: vLLM closes one after an error.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False
    ) as client:
        models = await client.get(vllm_api.MODELS)
        recorder = Recorder(client, models.raise_for_status().json()["data"][0]["id"])
        for call in CALLS:
            await recorder.call(*call)
        too_long = (40,) * TOO_LONG
        await recorder.call("answer", "POST", vllm_api.GENERATE, body("answer", SHORT))
        await recorder.call("refused", "POST", vllm_api.GENERATE, body("refused", SHORT, too_long))
        for name, prompt in (("stream", PROMPT), ("stream_refused", too_long)):
            async for _ in recorder.stream(name, body(name, SHORT, prompt, stream=True)):
                pass
        await _aborted(recorder)
        await _paused(recorder)
    return recorder.replies


async def _aborted(recorder: Recorder) -> None:
    """A stream that is ended after its first tokens."""
    name = "stream_aborted"
    for _ in range(ATTEMPTS):
        lines = recorder.stream(name, body(name, LONG, stream=True))
        await anext(lines)
        await recorder.call("abort", "POST", vllm_api.ABORT, vllm_api.abort_body([name]))
        async for _ in lines:
            pass
        if '"finish_reason":"length"' not in recorder.replies[name].body:
            return
    raise RuntimeError("the server is done with every answer before it can be aborted")


async def _paused(recorder: Recorder) -> None:
    """A stream that stands still, loses its keys and values, and goes on."""
    name = "stream_paused"
    for _ in range(ATTEMPTS):
        lines = recorder.stream(name, body(name, LONG, stream=True))
        await anext(lines)
        await recorder.call("pause", "POST", vllm_api.pause_path("keep", clear_cache=False), None)
        await recorder.call("is_paused_yes", "GET", vllm_api.IS_PAUSED, None)
        await recorder.call("reset_refused", "POST", vllm_api.reset_prefix_cache_path(running=False), None)
        await recorder.call("reset_running", "POST", vllm_api.reset_prefix_cache_path(running=True), None)
        await recorder.call("resume", "POST", vllm_api.RESUME, None)
        async for _ in lines:
            pass
        if recorder.replies["reset_refused"].body == {"success": False}:
            return
    raise RuntimeError("the server is done with every answer before it can be paused")


def write(replies: dict[str, Reply], folder: Path) -> None:
    """One file for each reply."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, reply in replies.items():
        if isinstance(reply.body, str):
            (folder / f"{name}.sse").write_text(reply.body)
        else:
            text = json.dumps({"status": reply.status, "body": reply.body}, indent=1)
            (folder / f"{name}.json").write_text(text + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="base URL of the server")
    parser.add_argument("--to", type=Path, default=Path("tests/contract"), help="folder of the versions' folders")
    options = parser.parse_args(arguments)
    try:
        replies = asyncio.run(record(options.url, os.environ.get(TOKEN_VARIABLE, "")))
    except httpx.HTTPError as error:
        raise SystemExit(f"the server at {options.url} does not answer: {error!r}") from None
    folder = options.to / vllm_api.parse_server_version(replies["version"].body)
    write(replies, folder)
    print(f"{len(replies)} replies in {folder}")


if __name__ == "__main__":
    main()
