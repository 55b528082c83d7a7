"""vLLM's interface: the only module that knows its routes, the shapes of requests and replies, and its flags.

Pure functions over decoded JSON, the standard library alone; who sends and receives, and how, is the callers' business.
Replies are not trusted: whatever lacks the expected shape raises ReplyError, nothing else.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode

from dapo_megatron.errors import UserError

if TYPE_CHECKING:  # it imports numpy
    from dapo_megatron.rollout.requests import Sampling

# Minor versions whose recorded replies the contract tests read.
TESTED = ("0.32",)
# The first whose answers say which weights their tokens are of, and whose streams always say that they were aborted.
OLDEST = (0, 32)

GENERATE = "/inference/v1/generate"
ABORT = "/abort_requests"
HEALTH = "/health"
VERSION = "/version"
MODELS = "/v1/models"
METRICS = "/metrics"
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
    """A reply that is not what vLLM sends, or that reports an error; the text says what is wrong with it.

    `code` is the HTTP status of an error that a stream reports: its own was 200, whatever happens later. 400 means that
    the request can never succeed.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


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
    sampling: "Sampling",
    request_id: str,
    *,
    vocabulary: int,
    received: Sequence[int] = (),
    cache_salt: str | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """Body of GENERATE.

    An answer ends early, with "length", where prompt and answer reach the server's --max-model-len; a prompt that
    leaves no room at all is refused (400).

    Args:
        prompt_ids: [P]
        sampling: how to sample, for the whole answer.
        request_id: unlike that of any request still running: ABORT would end both.
        vocabulary: ids are below it.
        received: tokens of the answer that arrived already: they count as prompt, the rest of `max_tokens` is asked.
        cache_salt: the prefix cache serves only what was computed under the same salt. With the label of the weights,
            no keys and values of other weights are used, even while the cache cannot be reset.
        stream: for a stream of messages that `parse_chunk` reads, instead of one that `parse_answer` reads.

    Raises:
        ValueError: nothing is left to ask for, or an id is not in the vocabulary (such a request ends vLLM's engine).
    """
    rest = sampling.max_tokens - len(received)
    if rest < 1:
        raise ValueError(f"request {request_id} has all of its {sampling.max_tokens} tokens already")
    token_ids = [*prompt_ids, *received]
    if not token_ids or min(token_ids) < 0 or max(token_ids) >= vocabulary:
        raise ValueError(f"request {request_id}: token ids are not all from 0 to {vocabulary - 1}, or there are none")
    return {
        "request_id": request_id,
        "token_ids": token_ids,
        "cache_salt": cache_salt,
        "sampling_params": _sampling_params(sampling, rest, len(received)),
        "stream": stream,
    }


def _sampling_params(sampling: "Sampling", max_tokens: int, received: int) -> dict[str, Any]:
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
    """Body of ABORT for requests by the ids that `generate_body` was given; at least one.

    They end with what there is, and finish_reason "abort". Ids that are not known are ignored.
    """
    ids = [REQUEST_PREFIX + request_id for request_id in request_ids]
    if not ids:
        raise ValueError("an empty list would abort all requests of the server")
    return {"request_ids": ids}


def pause_path(mode: PauseMode, *, clear_cache: bool) -> str:
    """PAUSE with its query. Requests that come now wait for RESUME.

    Those under way end with finish_reason "abort", are waited for, or (keep) stop and go on after RESUME: with the
    keys and values they have, or with `clear_cache` with new ones, computed by the weights of then.
    """
    return f"{PAUSE}?{urlencode({'mode': mode, 'clear_cache': str(clear_cache).lower()})}"


def reset_prefix_cache_path(*, running: bool) -> str:
    """RESET_PREFIX_CACHE with its query.

    Requests under way, paused ones included, hold blocks: with `running` they give them up and compute them again, else
    the reset fails (`parse_reset` is False). A server that returns routed experts must be paused with "keep" for
    `running`.
    """
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
        error = message["error"]
        code = error.get("code") if isinstance(error, dict) else None
        raise ReplyError(f"the server reports an error: {error_text(message)}", code if type(code) is int else None)
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


def parse_server_version(reply: Any) -> str:
    """vLLM's version, such as 0.32.0."""
    return str(_field(reply, "version", str))


def parse_model_length(reply: Any) -> int:
    """Most tokens of a sequence, prompt and answer, from the reply of MODELS."""
    models = _field(reply, "data", list)
    if len(models) != 1:
        raise ReplyError(f"the server has {len(models)} models instead of one")
    return int(_field(models[0], "max_model_len", int))


def parse_rpc(reply: Any) -> list[Any]:
    """What each worker's method returned."""
    return list(_field(reply, "results", list))


@dataclass(frozen=True)
class Activity:
    """What a server does: requests that run and that wait, and the share of its KV cache in use. None: not said."""

    running: int | None
    waiting: int | None
    kv_cache: float | None  # from 0 to 1


def parse_metrics(text: str) -> Activity:
    """What METRICS says, in the format of Prometheus; summed over engines, the KV cache of the fullest."""
    values: dict[str, list[float]] = {"num_requests_running": [], "num_requests_waiting": [], "kv_cache_usage_perc": []}
    try:
        for name, value in re.findall(r"^vllm:(\w+)(?:\{.*\})? ([0-9.eE+-]+)$", text, re.MULTILINE):
            if name in values:
                values[name].append(float(value))
        running, waiting, kv_cache = values.values()
        counts = [int(sum(numbers)) if numbers else None for numbers in (running, waiting)]
    except (ValueError, OverflowError):
        raise ReplyError("a metric is not a finite number") from None
    return Activity(counts[0], counts[1], max(kv_cache, default=None))


def check_status(reply: Any, expected: Literal["aborted", "paused", "resumed", "sleeping", "awake"]) -> None:
    """Raises ReplyError unless the reply of ABORT, PAUSE, RESUME, SLEEP or WAKE_UP says that it is done."""
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
    """A warning for a vLLM `version` (such as 0.33.1) whose replies the contract tests do not read; else None.

    Raises UserError if the version is known to lack something.
    """
    numbers = version.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"vLLM {version} does not say which weights sampled a token: install vLLM {oldest} or later in the "
            "environment of the servers (fleet.python)"
        )
    if ".".join(numbers) in TESTED:
        return None
    return f"vLLM {version} was not tested with this package (tested: {', '.join(TESTED)}): its replies may differ"


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
    hf_overrides: Mapping[str, Any] | None,
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
    flags += ["--hf-overrides", json.dumps(hf_overrides)] if hf_overrides else []
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
