"""One vLLM server as the rollout controller sees it: token ids in, token ids and log-probs out, as they come."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import numpy as np
import orjson

from dapo_megatron.rollout import vllm_api
from dapo_megatron.rollout.checks import GUARDED, open_to_strangers
from dapo_megatron.rollout.requests import NOTHING, UNKNOWN_VERSION, Generated, RequestError, Sampling
from dapo_megatron.rollout.vllm_api import Chunk, Ending, ReplyError
from dapo_megatron.sync.versions import parse_version
from dapo_megatron.types import NO_ROUTES, Float32, Int16, Int32

ABORT_GRACE = 5.0
"""Seconds in which an aborted answer ends, whether or not the server still answers."""

# What a reply may have at most: a token takes about 155 bytes of JSON, its routes a few hundred more.
BYTES_PER_TOKEN = 4096
SPARE_BYTES = 2**20
REFUSED = (400, 413, 422)  # the request itself is wrong, for every server
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself."""

    vllm: str  # its version, such as 0.32.0
    weights: int  # version of its weights
    world_size: int
    paused: bool


class ServerClient:
    """Talks to the server at base `url` under `token`; `timeout` in seconds bounds each request.

    Token ids of prompts and answers are below `vocabulary`. Use it inside `async with`. Every method raises
    RequestError if the server refuses, is gone, is late, or sends what it should not.
    """

    def __init__(self, url: str, token: str, timeout: float, vocabulary: int = LARGEST_ID) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout = timeout
        self._vocabulary = vocabulary
        self._session: aiohttp.ClientSession | None = None
        self._running: dict[str, _Arriving] = {}

    async def __aenter__(self) -> "ServerClient":
        # limit 0: the sampler decides how many requests are under way. vLLM closes connections that were idle
        # for 5 s; reusing one at that moment would fail.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        unlimited = aiohttp.ClientTimeout(total=None)  # each request has its own limit
        self._session = aiohttp.ClientSession(connector=connector, timeout=unlimited)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        so_far: Generated = NOTHING,
        version: int = UNKNOWN_VERSION,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Generated:
        """One whole answer to a prompt, which goes on after `so_far`.

        Answers of a group are separate requests: they share the prompt's cached keys and values all the same, and each
        can be continued or aborted by itself. Cancelling it closes the connection, which ends the request on the
        server, too.

        Args:
            prompt_ids: [P]
            sampling: how to sample, for the whole answer.
            request_id: unlike that of any request before.
            so_far: the part of the answer that is there already.
            version: of the weights that the server has; what arrives of an answer that is not completed is said to be
                of this version.
            on_tokens: called with the number of tokens that have just arrived.

        Raises:
            RequestError: with `so_far` and everything that had arrived.
        """
        arriving = _Arriving(len(prompt_ids), so_far, version, on_tokens)
        self._running[request_id] = arriving
        try:
            body = vllm_api.generate_body(
                prompt_ids,
                sampling,
                request_id,
                vocabulary=self._vocabulary,
                received=so_far.token_ids.tolist(),
                cache_salt=None if version == UNKNOWN_VERSION else str(version),
                stream=True,
            )
            async with asyncio.timeout(self._timeout) as arriving.limit:
                await self._receive(body, arriving)
            return arriving.whole()
        except TimeoutError as error:
            late = "" if arriving.aborted else f": TimeoutError, no whole answer after {self._timeout:g} s"
            raise self._failed(f"an answer was given up{late}", arriving) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(f"POST {vllm_api.GENERATE} failed: {error!r}", arriving) from error
        except ReplyError as error:
            kind: Literal["refused", "server"] = "refused" if error.code in REFUSED else "server"
            raise self._failed(f"an answer failed: {error}", arriving, kind) from error
        except ValueError as error:  # of generate_body: no server can answer this
            raise self._failed(str(error), arriving, "refused") from error
        finally:
            del self._running[request_id]
            arriving.ended.set()

    async def abort(self, request_ids: Iterable[str], grace: float) -> None:
        """End answers: their `generate` raises RequestError of the kind `aborted`, within `grace` seconds.

        The server is asked, so that the last tokens come; an answer that it does not end is given up.
        """
        running = {name: self._running[name] for name in request_ids if name in self._running}
        if not running:
            return
        for arriving in running.values():
            arriving.aborted = True
        try:
            async with asyncio.timeout(grace):
                await self._call("POST", vllm_api.ABORT, vllm_api.abort_body(running))
                await asyncio.gather(*(arriving.ended.wait() for arriving in running.values()))
        except (RequestError, TimeoutError):
            for arriving in running.values():
                if not arriving.ended.is_set():
                    arriving.give_up()
            await asyncio.gather(*(arriving.ended.wait() for arriving in running.values()))

    async def health(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", vllm_api.HEALTH)
        except RequestError:
            return False
        return True

    async def facts(self) -> ServerFacts:
        """What the server says about itself. Raises RequestError also if it opens without its token."""
        async with self._request("GET", GUARDED, authorized=False) as reply:
            if fault := open_to_strangers(reply.status):
                raise RequestError(f"server {self.url} {fault}", kind="refused")
        version = await self._call("GET", vllm_api.VERSION)
        weights = await self._call("GET", vllm_api.WEIGHT_INFO)
        world = await self._call("GET", vllm_api.WORLD_SIZE)
        paused = await self._call("GET", vllm_api.IS_PAUSED)
        try:
            return ServerFacts(
                vllm_api.parse_server_version(version),
                parse_version(vllm_api.parse_weight_info(weights)),
                vllm_api.parse_world_size(world),
                vllm_api.parse_is_paused(paused),
            )
        except ValueError as error:
            raise RequestError(f"server {self.url}: {error}") from error

    async def activity(self) -> vllm_api.Activity:
        """What the server does."""
        text = (await self._text("GET", vllm_api.METRICS)).decode(errors="replace")
        try:
            return vllm_api.parse_metrics(text)
        except ReplyError as error:
            raise RequestError(f"server {self.url}: {error}") from error

    async def pause(self) -> None:
        """Stop the answers under way where they are, with the keys and values they have."""
        await self._call("POST", vllm_api.pause_path("keep", clear_cache=False))

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("POST", vllm_api.RESUME)

    async def sleep(self) -> None:
        """Drop weights, keys and values; a push brings the weights back."""
        path = vllm_api.sleep_path(2)
        try:
            vllm_api.check_status(await self._call("POST", path), "sleeping")
        except ReplyError as error:
            raise RequestError(f"server {self.url}: POST {path}: {error}") from error

    async def _receive(self, body: dict[str, Any], arriving: "_Arriving") -> None:
        asked = body["sampling_params"]["max_tokens"]
        limit = SPARE_BYTES + BYTES_PER_TOKEN * (len(body["token_ids"]) + asked)
        async with self._open("POST", vllm_api.GENERATE, body) as reply:
            if reply.status != 200:
                raise _refusal(reply.status, await _read(reply))
            async for payload in _payloads(reply.content, limit):
                message = _decoded(payload)
                arriving.add(
                    vllm_api.parse_chunk(
                        message, received=arriving.received, max_tokens=asked, vocabulary=self._vocabulary
                    )
                )
                if arriving.ending is not None:
                    await _read_to_end(reply.content)
                    return

    def _failed(self, text: str, arriving: "_Arriving", kind: Literal["refused", "server"] = "server") -> RequestError:
        return RequestError(f"server {self.url}: {text}", arriving.part(), "aborted" if arriving.aborted else kind)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = await self._text(method, path, body)
        try:
            return orjson.loads(content) if content else None
        except ValueError as error:
            raise RequestError(f"server {self.url}: {method} {path} was not answered in JSON") from error

    async def _text(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        async with self._request(method, path, body) as reply:
            content = await _read(reply)
            if reply.status != 200:
                raise RequestError(f"server {self.url}: {method} {path}: {_refusal(reply.status, content)}")
        return content

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, authorized: bool = True
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request that must be over in time."""
        try:
            async with asyncio.timeout(self._timeout), self._open(method, path, body, authorized) as reply:
                yield reply
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError(f"server {self.url}: {method} {path} failed: {error!r}") from error

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None = None, authorized: bool = True
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("ServerClient is used outside its `async with`")
        data = None if body is None else orjson.dumps(body)
        return self._session.request(method, self.url + path, data=data, headers=self._headers if authorized else None)


def _refusal(status: int, content: bytes) -> ReplyError:
    """The error that a reply of another status than 200 is."""
    return ReplyError(f"status {status}, {content[:500].decode(errors='replace')}", status)


class _Arriving:
    """An answer on its way: what there was before, and what has come since."""

    def __init__(self, prompt_length: int, so_far: Generated, version: int, on_tokens: Callable[[int], None]) -> None:
        self.received = 0  # tokens of this request
        self.ending: Ending | None = None
        self.aborted = False
        self.ended = asyncio.Event()
        self.limit: asyncio.Timeout | None = None
        self._prompt_length = prompt_length
        self._so_far = so_far
        self._version = version
        self._on_tokens = on_tokens
        self._ids: list[Int32] = []
        self._log_probs: list[Float32] = []
        self._versions: Int32 | None = None  # of this request's tokens, once it has ended
        self._routes = NO_ROUTES

    def add(self, chunk: Chunk) -> None:
        """Keep a chunk. Raises ReplyError if its ending makes no sense; its tokens do not count then."""
        total = self.received + len(chunk.token_ids)
        if chunk.ending is not None:
            self._versions = _versions(chunk.ending)
            self._routes = _routes(chunk.ending, self._prompt_length + len(self._so_far.token_ids) + total)
        self.ending = chunk.ending
        self.received = total
        self._ids.append(np.array(chunk.token_ids, np.int32))
        self._log_probs.append(np.array(chunk.log_probs, np.float32))
        if chunk.token_ids:
            self._on_tokens(len(chunk.token_ids))

    def give_up(self) -> None:
        """End it now, unless its ending is there."""
        if self.limit is not None and self.ending is None and not self.limit.expired():
            self.limit.reschedule(0)

    def whole(self) -> Generated:
        """The whole answer. Raises ReplyError if it was cut off."""
        if self.ending is None:
            raise ReplyError("its stream ended before it did")
        if self.ending.finish_reason == "abort":
            raise ReplyError("the server aborted it")
        return self._generated(self.ending.finish_reason)

    def part(self) -> Generated:
        """Everything that has arrived."""
        return self._generated("partial") if self.received else self._so_far

    def _generated(self, finish_reason: Literal["stop", "length", "partial"]) -> Generated:
        so_far = self._so_far
        versions = np.full(self.received, self._version, np.int32) if self._versions is None else self._versions
        return Generated(
            np.concatenate([so_far.token_ids, *self._ids]),
            np.concatenate([so_far.log_probs, *self._log_probs]),
            np.concatenate([so_far.versions, versions]),
            finish_reason,
            _joined_routes(so_far.routes, self._routes, self._prompt_length, len(so_far.token_ids), self.received),
        )


def _versions(ending: Ending) -> Int32:
    """The weight version of each token of a request, [T]."""
    try:
        versions = [parse_version(label) for label, _ in ending.spans]
    except ValueError as error:
        raise ReplyError(f"a weight version is not ours: {error}") from None
    return np.repeat(np.array(versions, np.int32), np.array([count for _, count in ending.spans], np.int64))


def _routes(ending: Ending, tokens: int) -> Int16:
    """The routes of all tokens but the last one, [tokens - 1, L, k], or empty."""
    if ending.routed_experts is None:
        return NO_ROUTES
    try:
        routes = np.load(io.BytesIO(ending.routed_experts), allow_pickle=False)
    except Exception as error:  # NumPy raises many types for damaged data
        raise ReplyError(f"routed_experts cannot be read: {error!r}") from None
    if routes.ndim != 3 or len(routes) != tokens - 1 or routes.dtype.kind not in "iu":
        raise ReplyError(f"routed_experts are {routes.dtype} {routes.shape} for {tokens} tokens")
    return np.asarray(routes, np.int16)


def _joined_routes(before: Int16, now: Int16, prompt: int, old: int, new: int) -> Int16:
    """Routes of prompt, `old` and `new` tokens: where a token was routed when it was sampled, -1 where nobody knows.

    `before` are those of an earlier request, [prompt + old, L, k] or empty; `now` those that the last one returned for
    everything but its last token, computed again for what came before it.
    """
    known = [routes for routes in (now, before) if len(routes)]
    if not known:
        return NO_ROUTES
    joined: Int16 = np.full((prompt + old + new, *known[0].shape[1:]), -1, np.int16)
    for routes in known:
        np.copyto(joined[: len(routes)], routes, where=routes >= 0)
    return joined


async def _payloads(content: aiohttp.StreamReader, limit: int) -> AsyncIterator[bytes]:
    """What the lines of a stream carry, up to its end. Raises ReplyError past `limit` bytes."""
    pieces: list[bytes] = []  # of a line that has begun
    received = 0
    async for data in content.iter_any():
        received += len(data)
        if received > limit:
            raise ReplyError(f"more than {limit} bytes came for one answer")
        *lines, last = data.split(b"\n")
        for line in lines:
            payload = vllm_api.stream_payload(b"".join([*pieces, line]))
            pieces.clear()
            if payload == vllm_api.DONE:
                return
            if payload is not None:
                yield payload
        pieces.append(last)


def _decoded(payload: bytes) -> Any:
    try:
        return orjson.loads(payload)
    except ValueError:
        raise ReplyError(f"a message is not JSON: {payload[:80]!r}") from None


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    """A reply that must be small; what is past SPARE_BYTES is left out."""
    content = b""
    while len(content) < SPARE_BYTES and (data := await reply.content.readany()):
        content += data
    return content[:SPARE_BYTES]


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Read what follows an answer, which is next to nothing: its connection can be used again then."""
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout(1):
            while await content.readany():
                pass
