"""A small stand-in for a vLLM server, for faults that a real one cannot show. It runs in the test's own event loop."""

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from dapo_megatron.rollout import vllm_api
from dapo_megatron.rollout.requests import Server

VOCABULARY = 97
INTERVAL = 4
TOKEN = "secret"

Fault = Literal[
    "500",
    "400",
    "garbage",
    "truncated",
    "closes",
    "hangs",
    "few_log_probs",
    "nan_log_probs",
    "null_log_probs",
    "too_many_tokens",
    "wrong_ids",
    "wrong_version",
    "wrong_routes",
    "strange_version",
    "empty_choices",
    "no_ending",
    "huge",
    "drip",
    "error_chunk",
    "400_in_stream",
    "aborts",
]


def next_token(sequence: Sequence[int]) -> int:
    """What every fake server says after `sequence`; so an answer that goes on elsewhere goes on as it would have."""
    return (31 * sequence[0] + 7 * len(sequence) + sequence[-1]) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens of the answer to `prompt`."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def log_prob(token: int) -> float:
    return -(token + 1) / VOCABULARY


def routes_of(sequence: Sequence[int]) -> np.ndarray:
    """Where a fake server's tokens go, [T, 2, 2]."""
    return np.array(sequence, np.uint8)[:, None, None] + np.arange(4, dtype=np.uint8).reshape(2, 2)


def encoded_routes(sequence: Sequence[int]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, routes_of(sequence))
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass
class FakeServer:
    """Answers by `next_token` in messages of INTERVAL tokens, with weights `version`.

    Each request takes the next of `faults`, which shows after the first message where it has to do with the stream;
    the last one stays if `stubborn`. `bodies` are those of all requests. `delay` in seconds before each message.
    """

    id: str = "fake"
    faults: list[Fault] = field(default_factory=list)
    stubborn: bool = False
    version: int = 3
    vllm: str = "0.32.0"
    paused: bool = False
    dead: bool = False  # it answers, but its engine is not there any more
    open_to_all: bool = False
    delay: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    answers_aborts: bool = True
    disconnected: int = 0
    routes: bool = False  # of every token but the last: two layers, two experts
    calls: list[str] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard])  # type: ignore[list-item]
        app.router.add_post(vllm_api.GENERATE, self._generate)
        app.router.add_post(vllm_api.ABORT, self._abort)
        app.router.add_post(vllm_api.PAUSE, self._called("paused"))
        app.router.add_post(vllm_api.RESUME, self._called("resumed"))
        app.router.add_get(vllm_api.HEALTH, self._health)
        for path, reply in {
            vllm_api.VERSION: {"version": self.vllm},
            vllm_api.WEIGHT_INFO: {"weight_version": str(self.version)},
            vllm_api.WORLD_SIZE: {"world_size": 1},
            vllm_api.IS_PAUSED: {"is_paused": self.paused},
        }.items():
            app.router.add_get(path, self._always(reply))
        app.router.add_get(vllm_api.METRICS, self._metrics)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def server(self) -> Server:
        return Server(self.id, self.url, TOKEN)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        allowed = self.open_to_all or request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not allowed and request.path != vllm_api.HEALTH:
            return web.json_response({"error": {"message": "missing or wrong bearer token", "code": 401}}, status=401)
        self.calls.append(request.path)
        response: web.StreamResponse = await handler(request)
        return response

    def _always(self, reply: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(reply)

        return handler

    def _called(self, status: str) -> Any:
        return self._always({"status": status})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        """Two engines, as vLLM lists them, among other numbers."""
        names = {
            "num_requests_running": (2.0, 1.0),
            "num_requests_waiting": (0.0, 7.0),
            "kv_cache_usage_perc": (0.25, 0.5),
        }
        lines = [
            f'vllm:{name}{{engine="{engine}",model_name="m"}} {value}'
            for name, values in names.items()
            for engine, value in enumerate(values)
        ]
        return web.Response(text="\n".join(["# HELP vllm:num_requests_running Requests", *lines, "other 1e+06", ""]))

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json())["request_ids"]
        if not self.answers_aborts:
            await asyncio.sleep(3600)
        self.aborted |= {id.removeprefix(vllm_api.REQUEST_PREFIX) for id in ids}
        return web.json_response({"status": "aborted", "aborted": len(ids)})

    def _fault(self) -> Fault | None:
        if self.stubborn and len(self.faults) == 1:
            return self.faults[0]
        return self.faults.pop(0) if self.faults else None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fault = self._fault()
        if fault in ("500", "400"):
            return web.json_response({"error": {"message": "out of order", "code": int(fault)}}, status=int(fault))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(request, response, body, fault)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnected += 1
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], fault: Fault | None
    ) -> None:
        sequence, asked = list(body["token_ids"]), body["sampling_params"]["max_tokens"]
        sent = 0
        while sent < asked:
            await asyncio.sleep(self.delay)
            if body["request_id"] in self.aborted or (fault == "aborts" and sent):
                await _send(response, self._message([], sent, "abort"))
                break
            ids = continuation(sequence, min(INTERVAL, asked - sent))
            sequence += ids
            sent += len(ids)
            message = self._message(ids, sent, "length" if sent == asked else None)
            if self.routes and sent == asked:
                message["choices"][0]["routed_experts"] = encoded_routes(sequence[:-1])
            if fault is not None and (sent > len(ids) or sent == asked):
                await _misbehave(fault, request, response, message)
                if fault in ENDS:
                    return
            else:
                await _send(response, message)
        await response.write(b"data: [DONE]\n\n")

    def _message(self, ids: list[int], sent: int, finish_reason: str | None) -> dict[str, Any]:
        content = [{"token": f"token_id:{i}", "logprob": log_prob(i), "bytes": None, "top_logprobs": []} for i in ids]
        spans = [{"version": str(self.version), "start": 0, "end": sent}] if sent else []
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": finish_reason,
            "token_ids": ids,
            "routed_experts": None,
            "weight_versions": spans if finish_reason else None,
        }
        return {"request_id": "generate-tokens-x", "choices": [choice]}


ENDS = {
    "garbage",
    "truncated",
    "closes",
    "hangs",
    "huge",
    "error_chunk",
    "400_in_stream",
    "no_ending",
}  # after these, nothing comes


async def _send(response: web.StreamResponse, message: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


async def _misbehave(fault: Fault, request: web.Request, response: web.StreamResponse, message: dict[str, Any]) -> None:
    """Send `message` as `fault` has it, or something else."""
    (choice,) = message["choices"]
    content = choice["logprobs"]["content"]
    match fault:
        case "garbage":
            await response.write(b"data: {this is not JSON\n\n")
        case "truncated":
            await response.write(b"data: " + json.dumps(message).encode()[:80])
        case "closes":
            assert request.transport is not None
            request.transport.abort()
        case "hangs":
            await asyncio.sleep(3600)
        case "huge":
            while True:
                await response.write(b"data: [" + b"0," * 2**16)
        case "error_chunk":
            await _send(response, {"error": {"message": "EngineCore encountered an issue", "code": 500}})
        case "400_in_stream":
            await _send(response, {"error": {"message": "The decoder prompt is too long", "code": 400}})
        case "drip":
            for byte in b"data: " + json.dumps(message).encode() + b"\n\n":
                await response.write(bytes([byte]))
        case "few_log_probs":
            content.pop()
        case "nan_log_probs":
            content[-1]["logprob"] = vllm_api.NO_LOG_PROB
        case "null_log_probs":
            content[-1]["logprob"] = None
        case "too_many_tokens":
            choice["token_ids"], choice["logprobs"]["content"] = choice["token_ids"] * 99, content * 99
        case "wrong_ids":
            choice["token_ids"][-1] = VOCABULARY
        case "wrong_version" | "strange_version" if choice["finish_reason"]:
            choice["weight_versions"][0]["version"] = "99" if fault == "wrong_version" else "latest"
        case "wrong_routes" if choice["finish_reason"]:
            choice["routed_experts"] = encoded_routes([1, 2, 3])
        case "empty_choices":
            message["choices"] = []
    if fault not in ENDS and fault != "drip":
        await _send(response, message)
