"""vLLM's interface: the only module that knows its routes, the shapes of requests and replies, and its flags.

Pure functions over decoded JSON, the standard library alone; who sends and receives, and how, is the callers' business.
Replies are not trusted: whatever lacks the expected shape raises ReplyError, nothing else.
"""

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlencode

# Minor versions whose recorded replies the contract tests read.
TESTED = ("0.29", "0.31", "0.32")

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
HEALTH = "/health"
VERSION = "/version"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
WEIGHT_INFO = "/weight_info"
WORLD_SIZE = "/get_world_size"
INIT_WEIGHT_TRANSFER = "/init_weight_transfer_engine"
START_WEIGHT_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_WEIGHT_UPDATE = "/finish_weight_update"
COLLECTIVE_RPC = "/collective_rpc"
SLEEP = "/sleep"
WAKE_UP = "/wake_up"
IS_SLEEPING = "/is_sleeping"

# vLLM puts this before the request ids of GENERATE; ABORT knows requests by the result.
REQUEST_PREFIX = "generate-tokens-"
# What vLLM sends where a log-prob is NaN, minus infinity or missing.
NO_LOG_PROB = -9999.0
# log_softmax in low precision may end up a little above zero; more than this is no probability.
LOG_PROB_SLACK = 1e-3
# The payload of a stream's last line.
DONE = b"[DONE]"
NPY_MAGIC = b"\x93NUMPY"

PauseMode = Literal["abort", "wait", "keep"]
FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


class ReplyError(ValueError):
    """A reply that is not what vLLM sends, or that reports an error; the text says what is wrong with it."""


class SamplingSettings(Protocol):
    """The fields of `rollout.requests.Sampling`, which this module cannot import."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of the whole answer."""
        ...

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        ...

    @property
    def top_p(self) -> float:
        """1 keeps all tokens."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer and stay in it, beside the model's end token."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """Whether the model's end token is a token like others."""
        ...

    @property
    def seed(self) -> int | None:
        """Makes one request repeatable."""
        ...


@dataclass(frozen=True)
class Ending:
    """What is known of an answer once it ends.

    `spans` are (label of the weights, number of tokens) in order; their numbers sum to the tokens of the request.
    `routed_experts` is an .npy file, if the server returns routes: `numpy.load(io.BytesIO(it), allow_pickle=False)` has
    shape [P + T - 1, layers, experts per token] and dtype uint8, uint16 or int32, for P prompt and T generated
    tokens (the last one was never fed back, so it has no route).
    """

    finish_reason: FinishReason
    spans: tuple[tuple[str, int], ...]
    routed_experts: bytes | None = None


@dataclass(frozen=True)
class Chunk:
    """The next T tokens of an answer, their log-probs, and its ending if they are the last (T may be 0 then)."""

    token_ids: list[int]  # [T]
    log_probs: list[float]  # [T], natural
    ending: Ending | None


def generate_body(
    prompt_ids: Sequence[int],
    sampling: SamplingSettings,
    request_id: str,
    *,
    received: Sequence[int] = (),
    stream: bool = False,
) -> dict[str, Any]:
    """Body of GENERATE. An answer of which `received` tokens arrived already is continued: these count as prompt, the
    rest of `max_tokens` is asked for. Raises ValueError if nothing is left to ask for.
    """
    rest = sampling.max_tokens - len(received)
    if rest < 1:
        raise ValueError(f"request {request_id} has all of its {sampling.max_tokens} tokens already")
    return {
        "request_id": request_id,
        "token_ids": [*prompt_ids, *received],
        "sampling_params": _sampling_params(sampling, rest, len(received)),
        "stream": stream,
    }


def _sampling_params(sampling: SamplingSettings, max_tokens: int, received: int) -> dict[str, Any]:
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
        # With the same seed a continuation would draw its first token with the noise of the answer's first token.
        "seed": None if sampling.seed is None else sampling.seed + received,
        "max_tokens": max_tokens,
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


def abort_body(request_ids: Iterable[str]) -> dict[str, Any]:
    """Body of ABORT for requests by the ids that `generate_body` was given."""
    return {"request_ids": [REQUEST_PREFIX + request_id for request_id in request_ids]}


def pause_path(mode: PauseMode) -> str:
    """PAUSE with its query: what happens to the requests under way."""
    return f"{PAUSE}?{urlencode({'mode': mode})}"


def reset_prefix_cache_path(*, running: bool) -> str:
    """RESET_PREFIX_CACHE with its query; `running`: requests under way give up their keys and values, too."""
    return f"{RESET_PREFIX_CACHE}?{urlencode({'reset_running_requests': str(running).lower()})}"


def sleep_path(level: Literal[1, 2]) -> str:
    """SLEEP with its query. 1: weights go to host memory; 2: they are dropped. The KV cache is dropped in both."""
    return f"{SLEEP}?{urlencode({'level': level})}"


def wake_up_path(tags: Sequence[Literal["weights", "kv_cache"]] = ()) -> str:
    """WAKE_UP with its query; no tags: everything."""
    return f"{WAKE_UP}?{urlencode([('tags', tag) for tag in tags])}" if tags else WAKE_UP


def init_weight_transfer_body(info: Mapping[str, Any]) -> dict[str, Any]:
    """Body of INIT_WEIGHT_TRANSFER: `info` goes to every worker's receiver."""
    return {"init_info": info}


def update_weights_body(info: Mapping[str, Any]) -> dict[str, Any]:
    """Body of UPDATE_WEIGHTS: `info` goes to every worker's receiver."""
    return {"update_info": info}


def finish_weight_update_body(label: str) -> dict[str, Any]:
    """Body of FINISH_WEIGHT_UPDATE: the weights that were received are called `label` from now on."""
    return {"weight_version": label}


def rpc_body(method: str, **arguments: Any) -> dict[str, Any]:
    """Body of COLLECTIVE_RPC: every worker calls `method` of its extension with these keyword arguments."""
    return {"method": method, "kwargs": arguments}


def stream_payload(line: bytes) -> bytes | None:
    """What a line of a stream carries: JSON, or DONE. None: nothing (an empty line, a comment or another field)."""
    return line[5:].strip() if line.startswith(b"data:") else None


def parse_chunk(message: Any, *, received: int, max_tokens: int, vocabulary: int) -> Chunk:
    """One message of a stream of GENERATE.

    Args:
        message: decoded JSON.
        received: tokens of this request that came before.
        max_tokens: what this request asked for.
        vocabulary: ids are below it.
    """
    choice = _only_choice(message)
    token_ids = _token_ids(choice, vocabulary)
    total = received + len(token_ids)
    if total > max_tokens:
        raise ReplyError(f"{total} tokens came, {max_tokens} were asked for")
    log_probs = _log_probs(choice, len(token_ids))
    reason = choice.get("finish_reason")
    return Chunk(token_ids, log_probs, None if reason is None else _ending(choice, reason, total))


def parse_answer(message: Any, *, max_tokens: int, vocabulary: int) -> tuple[list[int], list[float], Ending]:
    """The whole reply of GENERATE without streaming: token ids [T], log-probs [T] and the ending."""
    chunk = parse_chunk(message, received=0, max_tokens=max_tokens, vocabulary=vocabulary)
    if chunk.ending is None:
        raise ReplyError("the answer has no finish_reason")
    return chunk.token_ids, chunk.log_probs, chunk.ending


def _only_choice(message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and "error" in message:
        raise ReplyError(f"the server reports an error: {error_text(message)}")
    choices = _field(message, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise ReplyError(f"a reply has {len(choices)} choices where one object was expected")
    return dict(choices[0])


def _token_ids(choice: dict[str, Any], vocabulary: int) -> list[int]:
    ids: list[int] = _field(choice, "token_ids", list)
    # Sets of types instead of a test per token: millions of tokens pass here.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary):
        raise ReplyError(f"token ids are not all integers from 0 to {vocabulary - 1}")
    return ids


def _log_probs(choice: dict[str, Any], count: int) -> list[float]:
    """The log-probs of `count` tokens."""
    content = _field(_field(choice, "logprobs", dict), "content", list) if count else []
    if len(content) != count:
        raise ReplyError(f"{count} tokens came with {len(content)} log-probs")
    try:
        values = [entry["logprob"] for entry in content]
    except (KeyError, TypeError):
        raise ReplyError("a token came without its log-prob") from None
    if not set(map(type, values)) <= {float, int}:
        raise ReplyError("a log-prob is not a number")
    # NaN may hide from min and max, not from a sum.
    if values and not (min(values) > NO_LOG_PROB and max(values) <= LOG_PROB_SLACK and math.isfinite(sum(values))):
        raise ReplyError("a token came without a valid log-prob (the engine's logits may be NaN)")
    return values


def _ending(choice: dict[str, Any], reason: Any, total: int) -> Ending:
    if reason not in FINISH_REASONS:
        raise ReplyError(f"unknown finish_reason {str(reason)[:80]!r}")
    return Ending(reason, _spans(choice.get("weight_versions"), total), _routed_experts(choice.get("routed_experts")))


def _spans(spans: Any, total: int) -> tuple[tuple[str, int], ...]:
    """(label, number of tokens) of each span; together they must cover `total` tokens without gaps."""
    if total == 0:
        return ()  # aborted before the first token
    if not isinstance(spans, list) or not spans:
        raise ReplyError("an answer came without weight versions")
    read, covered = [], 0
    for span in spans:
        label, start, end = _field(span, "version", str), _field(span, "start", int), _field(span, "end", int)
        if start != covered or end < start:
            raise ReplyError(f"weight versions do not follow each other: {start} to {end} after {covered} tokens")
        if end > start:
            read.append((label, end - start))
        covered = end
    if covered != total:
        raise ReplyError(f"weight versions cover {covered} of {total} tokens")
    return tuple(read)


def _routed_experts(text: Any) -> bytes | None:
    if text is None:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ReplyError("routed_experts is not base64") from None
    if not data.startswith(NPY_MAGIC):
        raise ReplyError("routed_experts is not an .npy file")
    return data


def parse_weight_info(reply: Any) -> str:
    """Label of the weights that the server samples with now."""
    return str(_field(reply, "weight_version", str))


def parse_world_size(reply: Any) -> int:
    """Workers of the server: TP x PP x DP."""
    size = int(_field(reply, "world_size", int))
    if size < 1:
        raise ReplyError(f"world_size is {size}")
    return size


def parse_reset(reply: Any) -> bool:
    """Whether RESET_PREFIX_CACHE forgot everything."""
    return bool(_field(reply, "success", bool))


def parse_is_paused(reply: Any) -> bool:
    """Whether the server is paused."""
    return bool(_field(reply, "is_paused", bool))


def parse_is_sleeping(reply: Any) -> bool:
    """Whether the server sleeps."""
    return bool(_field(reply, "is_sleeping", bool))


def parse_server_version(reply: Any) -> str:
    """vLLM's version, such as 0.32.0."""
    return str(_field(reply, "version", str))


def parse_rpc(reply: Any) -> list[Any]:
    """What each worker's method returned."""
    return list(_field(reply, "results", list))


def check_status(reply: Any, expected: Literal["paused", "resumed", "sleeping", "awake"]) -> None:
    """Raises ReplyError unless the reply of PAUSE, RESUME, SLEEP or WAKE_UP says that it is done."""
    status = _field(reply, "status", str)
    if status != expected:
        raise ReplyError(f"status is {status[:80]!r} instead of {expected!r}")


def error_text(body: Any) -> str:
    """The reason in an error body; vLLM has three shapes of them."""
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        body = error.get("message", error) if isinstance(error, dict) else error
    return str(body)[:500]


def _field(value: Any, name: str, kind: type) -> Any:
    """`value[name]`, which is of type `kind`."""
    if not isinstance(value, dict) or name not in value:
        raise ReplyError(f"a reply has no {name}")
    field = value[name]
    # bool is an int to isinstance, but not in JSON.
    if type(field) is not kind:
        raise ReplyError(f"{name} in a reply is a {type(field).__name__}, not a {kind.__name__}")
    return field


def warn_if_untested(version: str) -> str | None:
    """A warning for a vLLM `version` (such as 0.33.1) whose replies the contract tests do not read; else None."""
    minor = ".".join(version.split(".")[:2])
    if minor in TESTED:
        return None
    return f"vLLM {version} was not tested with this package, {', '.join(TESTED)} were: its replies may differ"


def server_flags(
    *,
    model: str,
    host: str,
    port: int,
    seed: int,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    stream_interval: int,
    tensor: int,
    pipeline: int,
    expert_parallel: bool,
    routed_experts: bool,
    sleep: bool,
    dummy_weights: bool,
    eager: bool,
    kv_cache_bytes: int | None,
    gpu_memory_utilization: float | None,
) -> list[str]:
    """Arguments of vLLM's API server; None leaves a flag out."""
    flags = ["--model", model, "--host", host, "--port", str(port), "--seed", str(seed)]
    flags += ["--dtype", dtype, "--max-model-len", str(max_model_len)]
    flags += ["--max-num-seqs", str(max_num_seqs), "--block-size", str(block_size)]
    flags += ["--stream-interval", str(stream_interval)]
    flags += ["--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline)]
    # Sampling is what the request says, not what the model's generation_config adds to it, and
    # log-probs are those of the distribution that was sampled from (after the temperature).
    flags += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    # Token ids in and out: no tokenizer is loaded and nothing is detokenised.
    flags += ["--tokens-only", "--disable-uvicorn-access-log"]
    flags += ["--middleware", "dapo_megatron.rollout.middleware.TokenMiddleware"]
    flags += ["--weight-transfer-config", '{"backend": "dapo"}']
    flags += ["--worker-extension-cls", "dapo_megatron.sync.receiver.ReceiverExtension"]
    flags += ["--load-format", "dummy"] if dummy_weights else []
    if kv_cache_bytes is not None:
        flags += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    if gpu_memory_utilization is not None:
        flags += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
    switches = {
        "--enable-expert-parallel": expert_parallel,
        "--enable-return-routed-experts": routed_experts,
        "--enable-sleep-mode": sleep,
        "--enforce-eager": eager,
    }
    return flags + [flag for flag, wanted in switches.items() if wanted]
