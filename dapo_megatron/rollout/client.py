"""One vLLM server as the rollout controller sees it: token ids in, token ids and log-probs out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.sync.versions import INITIAL_LABEL, parse_version

# vLLM puts this before the request ids of the route that answers are generated with.
REQUEST_PREFIX = "generate-tokens-"
# What vLLM sends where a log-prob is NaN, minus infinity or missing.
NO_LOG_PROB = -9999.0


class RequestError(RuntimeError):
    """A request was not answered; the text names server and reason. It may be sent again."""


@dataclass(frozen=True)
class Generated:
    """One answer: T generated tokens, the end token included, and the log-prob of each.

    `log_probs` are natural, under the distribution that was sampled from. `finish_reason` is "stop", "length"
    or "abort". `versions` are the weight versions of the first and the last token.
    """

    token_ids: tuple[int, ...]  # [T]
    log_probs: tuple[float, ...]  # [T]
    finish_reason: str
    versions: tuple[int, int]


class ServerClient:
    """Talks to the server at base `url` under `token`; `timeout` in seconds bounds each request.

    Use it inside `async with`. Every method raises RequestError if the server refuses, is gone, or is late.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ServerClient":
        # limit 0: the sampler decides how many requests are under way. vLLM closes connections that were idle
        # for 5 s; reusing one at that moment would fail.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generated:
        """One answer to a prompt. Answers of a group are separate requests: they share the prompt's cached keys
        and values all the same, and each can be retried or aborted by itself.
        """
        body = {
            "request_id": request_id,
            "token_ids": list(prompt_ids),
            "sampling_params": sampling_params(sampling),
        }
        reply = await self._call("POST", "/inference/v1/generate", body)
        return parse_choice(reply["choices"][0])

    async def abort(self, request_id: str) -> None:
        """Ends a request; its `generate` returns what there is, with finish_reason "abort"."""
        await self._call("POST", "/inference/v1/abort_requests", {"request_ids": [REQUEST_PREFIX + request_id]})

    async def health(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health")
        except RequestError:
            return False
        return True

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        if self._session is None:
            raise RuntimeError("ServerClient is used outside its `async with`")
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._session.request(method, self.url + path, data=data) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestError(f"server {self.url}: {method} {path} failed: {error!r}") from error
        if reply.status != 200:
            detail = content[:500].decode(errors="replace")
            raise RequestError(f"server {self.url}: {method} {path} failed ({reply.status}): {detail}")
        return orjson.loads(content) if content else None


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """vLLM's sampling parameters, every one of them spelled out: a default may come from the model's folder."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": list(sampling.stop_token_ids),
        "bad_words": [],
        "logit_bias": None,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,  # of the sampled token alone
        "prompt_logprobs": None,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def parse_choice(choice: dict[str, Any]) -> Generated:
    """One choice of vLLM's reply. Raises RequestError if a token comes without its log-prob or weight version."""
    token_ids = tuple(choice["token_ids"])
    log_probs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"] or [])
    labels = [span["version"] for span in choice["weight_versions"] or []]
    if len(log_probs) != len(token_ids) or NO_LOG_PROB in log_probs:
        raise RequestError("an answer came without the log-prob of each token (the engine's logits may be NaN)")
    if token_ids and not labels:
        raise RequestError("an answer came without weight versions")
    # An aborted request may end before its first token.
    first, last = (labels[0], labels[-1]) if labels else (INITIAL_LABEL, INITIAL_LABEL)
    return Generated(token_ids, log_probs, choice["finish_reason"], (parse_version(first), parse_version(last)))
