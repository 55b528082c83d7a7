"""What vLLM is sent and what it replies: recorded replies of several versions, and replies that no version sends."""

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.errors import UserError
from dapo_megatron.rollout import vllm_api
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.server import server_arguments
from dapo_megatron.rollout.vllm_api import Chunk, Ending, ReplyError
from tests.models import REPOSITORY

FOLDERS = sorted((REPOSITORY / "tests" / "contract").iterdir())
VERSIONS = [folder.name for folder in FOLDERS]
VOCABULARY = 258
STAMPED = [name for name in VERSIONS if name.startswith(vllm_api.TESTED)]


def recorded(version: str, name: str) -> dict[str, Any]:
    """HTTP status and body of an ordinary reply."""
    return json.loads((REPOSITORY / "tests/contract" / version / f"{name}.json").read_text())


def body(version: str, name: str) -> Any:
    return recorded(version, name)["body"]


def messages(version: str, name: str) -> list[dict[str, Any]]:
    """The messages of a stream, which DONE must end."""
    lines = (REPOSITORY / "tests/contract" / version / f"{name}.sse").read_bytes().splitlines()
    payloads = [payload for payload in map(vllm_api.stream_payload, lines) if payload is not None]
    assert payloads[-1] == vllm_api.DONE
    return [json.loads(payload) for payload in payloads[:-1]]


def stamp(choice: dict[str, Any], total: int) -> None:
    """Adds what versions before 0.32 leave out."""
    choice.setdefault("weight_versions", [{"version": "default", "start": 0, "end": total}])


def read(version: str, name: str, *, max_tokens: int, stamped: bool = True) -> tuple[list[int], list[float], Ending]:
    """A whole recorded stream."""
    ids: list[int] = []
    log_probs: list[float] = []
    for message in messages(version, name):
        choice = message["choices"][0]
        if stamped and choice["finish_reason"]:
            stamp(choice, len(ids) + len(choice["token_ids"]))
        chunk = vllm_api.parse_chunk(message, received=len(ids), max_tokens=max_tokens, vocabulary=VOCABULARY)
        ids += chunk.token_ids
        log_probs += chunk.log_probs
    assert chunk.ending is not None
    return ids, log_probs, chunk.ending


def choice(**changes: Any) -> dict[str, Any]:
    """A reply of two tokens with two weight versions."""
    content = [{"token_id": 5, "logprob": -0.5, "rank": 1}, {"token_id": 6, "logprob": -1.5, "rank": 3}]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    whole = {"token_ids": [5, 6], "logprobs": {"content": content}, "finish_reason": "stop", "weight_versions": spans}
    return {"choices": [whole | changes]}


def parse(message: Any, *, received: int = 0, max_tokens: int = 9) -> Chunk:
    return vllm_api.parse_chunk(message, received=received, max_tokens=max_tokens, vocabulary=VOCABULARY)


# Recorded replies


def test_replies_are_recorded_of_three_versions() -> None:
    assert [name.rpartition(".")[0] for name in VERSIONS] == ["0.29", "0.31", "0.32"]
    assert STAMPED == ["0.32.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_small_replies_are_read(version: str) -> None:
    def reply(name: str) -> Any:
        return body(version, name)

    assert vllm_api.parse_server_version(reply("version")) == version
    assert vllm_api.parse_weight_info(reply("weight_info")) == "default"
    assert vllm_api.parse_world_size(reply("world_size")) == 1
    assert vllm_api.parse_model_length(reply("models")) == 256
    assert [vllm_api.parse_is_paused(reply(name)) for name in ("is_paused", "is_paused_yes")] == [False, True]
    assert vllm_api.parse_rpc(reply("rpc")) == [None]
    resets = [vllm_api.parse_reset(reply(name)) for name in ("reset_prefix_cache", "reset_refused", "reset_running")]
    assert resets == [True, False, True]
    vllm_api.check_status(reply("abort"), "aborted")
    vllm_api.check_status(reply("pause"), "paused")
    vllm_api.check_status(reply("resume"), "resumed")


@pytest.mark.parametrize("version", STAMPED)
def test_sleep_and_waking_are_confirmed(version: str) -> None:
    vllm_api.check_status(body(version, "sleep"), "sleeping")
    vllm_api.check_status(body(version, "wake_up"), "awake")


@pytest.mark.parametrize("version", VERSIONS)
def test_answer_and_stream_say_the_same_in_all_versions(version: str) -> None:
    expected, expected_log_probs, _ = read("0.32.0", "stream", max_tokens=10)
    message = body(version, "answer")
    stamp(message["choices"][0], 10)
    whole = vllm_api.parse_answer(message, max_tokens=10, vocabulary=VOCABULARY)
    for ids, log_probs, ending in (whole, read(version, "stream", max_tokens=10)):
        assert ids == expected
        assert log_probs == pytest.approx(expected_log_probs, abs=1e-4)
        assert ending == Ending("length", (("default", 10),))


@pytest.mark.parametrize("version", VERSIONS)
def test_stream_comes_in_pieces_with_one_ending(version: str) -> None:
    *first, last = messages(version, "stream")
    assert first
    assert all(parse(message, max_tokens=10).ending is None for message in first)
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("version", STAMPED)
def test_aborted_stream_ends_with_what_there_is(version: str) -> None:
    ids, log_probs, ending = read(version, "stream_aborted", max_tokens=120)
    assert 0 < len(ids) == len(log_probs) < 120
    assert ending == Ending("abort", (("default", len(ids)),))


@pytest.mark.parametrize("version", VERSIONS)
def test_paused_stream_goes_on_after_its_cache_was_reset(version: str) -> None:
    ids, _, ending = read(version, "stream_paused", max_tokens=120)
    assert len(ids) == 120
    assert ending.finish_reason == "length"
    assert ids[:10] == read(version, "stream", max_tokens=10)[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_refusals_carry_a_reason(version: str) -> None:
    assert recorded(version, "refused")["status"] == 400
    assert "maximum model length of 256" in vllm_api.error_text(body(version, "refused"))
    assert "no_such_method" in vllm_api.error_text(body(version, "rpc_unknown"))
    assert vllm_api.error_text(body(version, "no_such_route")) == "Not Found"
    with pytest.raises(ReplyError, match=r"the server reports an error: .*maximum model length of 256") as caught:
        parse(messages(version, "stream_refused")[0])
    assert caught.value.code == 400


@pytest.mark.parametrize("version", [name for name in VERSIONS if name not in STAMPED])
def test_older_versions_are_refused_for_what_they_lack(version: str) -> None:
    with pytest.raises(ReplyError, match="without weight versions"):
        read(version, "stream", max_tokens=10, stamped=False)
    assert body(version, "sleep") is None  # nothing confirms it
    with pytest.raises(UserError, match=rf"vLLM {version} does not say which weights .* install vLLM 0\.32 or later"):
        vllm_api.warn_if_untested(version)


def test_untested_version_is_named_with_the_tested_ones() -> None:
    assert [vllm_api.warn_if_untested(name) for name in ("0.32.0", "0.32.1rc1+cpu")] == [None, None]
    assert vllm_api.warn_if_untested("0.33.1") == (
        "vLLM 0.33.1 was not tested with this package (tested: 0.32): its replies may differ"
    )
    assert "vLLM dev was not tested" in str(vllm_api.warn_if_untested("dev"))
    assert vllm_api.warn_if_untested("1.2.0") is not None


# Hostile replies


def test_reply_is_read() -> None:
    assert parse(choice()) == Chunk([5, 6], [-0.5, -1.5], Ending("stop", (("3", 1), ("4", 1))))


def test_piece_without_an_end_needs_no_versions() -> None:
    assert parse(choice(finish_reason=None, weight_versions=None)).ending is None
    with pytest.raises(ReplyError, match="has no finish_reason"):
        vllm_api.parse_answer(choice(finish_reason=None), max_tokens=9, vocabulary=VOCABULARY)


def test_versions_cover_what_came_before() -> None:
    spans = [{"version": "3", "start": 0, "end": 6}, {"version": "4", "start": 6, "end": 6}]
    ending = parse(choice(weight_versions=spans), received=4).ending
    assert ending is not None
    assert ending.spans == (("3", 6),)


@pytest.mark.parametrize("spans", [None, []])
@pytest.mark.parametrize("logprobs", [None, {"content": []}])
def test_answer_aborted_before_its_first_token_is_empty(spans: Any, logprobs: Any) -> None:
    message = choice(token_ids=[], logprobs=logprobs, weight_versions=spans, finish_reason="abort")
    assert parse(message) == Chunk([], [], Ending("abort", ()))


def entries(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"logprob": value} for value in values]}}


def spans(*edges: Any) -> dict[str, Any]:
    return {"weight_versions": [{"version": "3", "start": start, "end": end} for start, end in edges]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_versions": None}, "without weight versions"),
        ({"weight_versions": []}, "without weight versions"),
        ({"weight_versions": "3"}, "without weight versions"),
        ({"weight_versions": [3]}, "has no version"),
        ({"weight_versions": [{"version": 3, "start": 0, "end": 2}]}, "version in a reply is a int, not a str"),
        (spans((0, "2")), "end in a reply is a str, not a int"),
        (spans((False, 2)), "start in a reply is a bool, not a int"),
        (spans((0, 1)), "cover 1 of 2 tokens"),
        (spans((0, 3)), "cover 3 of 2 tokens"),
        (spans((0, 1), (0, 2)), "do not follow each other"),
        (spans((0, 2), (2, 1)), "do not follow each other"),
        (entries(-0.5), "2 tokens came with 1 log-probs"),
        (entries(-0.5, -0.5, -0.5), "2 tokens came with 3 log-probs"),
        ({"logprobs": None}, "logprobs in a reply is a NoneType"),
        ({"logprobs": {"content": None}}, "content in a reply is a NoneType"),
        ({"logprobs": {"content": [{"logprob": -0.5}, {}]}}, "came without its log-prob"),
        ({"logprobs": {"content": [{"logprob": -0.5}, 7]}}, "came without its log-prob"),
        (entries(-0.5, None), "not a number"),
        (entries(-0.5, True), "not a number"),
        (entries(-0.5, vllm_api.NO_LOG_PROB), "valid log-prob"),
        (entries(-0.5, math.nan), "valid log-prob"),
        (entries(math.nan, -0.5), "valid log-prob"),
        (entries(-0.5, -math.inf), "valid log-prob"),
        (entries(-0.5, 0.01), "valid log-prob"),
        (entries(-0.5, -(10**400)), "valid log-prob"),
        ({"token_ids": None}, "token_ids in a reply is a NoneType"),
        ({"token_ids": [5, "6"]}, "token ids are not all integers"),
        ({"token_ids": [5, 6.0]}, "token ids are not all integers"),
        ({"token_ids": [5, True]}, "token ids are not all integers"),
        ({"token_ids": [5, [6]]}, "token ids are not all integers"),
        ({"token_ids": [5, -1]}, "token ids are not all integers from 0 to 257"),
        ({"token_ids": [5, VOCABULARY]}, "token ids are not all integers from 0 to 257"),
        ({"finish_reason": "error"}, "unknown finish_reason 'error'"),
        ({"finish_reason": ["stop"]}, "unknown finish_reason"),
        ({"finish_reason": {}}, "unknown finish_reason"),
        ({"routed_experts": "?"}, "not base64"),
        ({"routed_experts": "é"}, "not base64"),
        ({"routed_experts": 7}, "not base64"),
        ({"routed_experts": base64.b64encode(b"PK").decode()}, "not an .npy file"),
    ],
)
def test_wrong_choice_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ReplyError, match=reason):
        parse(choice(**changes))


@pytest.mark.parametrize("missing", ["token_ids", "logprobs", "weight_versions"])
def test_missing_field_is_refused(missing: str) -> None:
    message = choice()
    del message["choices"][0][missing]
    with pytest.raises(ReplyError):
        parse(message)


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        "text",
        [],
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [7]},
        {"choices": 2 * choice()["choices"]},
    ],
)
def test_wrong_message_is_refused(message: Any) -> None:
    with pytest.raises(ReplyError):
        parse(message)


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        ({"message": "broken", "code": 500}, "broken", 500),
        ({"message": "broken", "code": "500"}, "broken", None),
        ("broken", "broken", None),
        (None, "None", None),
    ],
)
def test_error_in_a_stream_is_told(error: Any, text: str, code: int | None) -> None:
    with pytest.raises(ReplyError, match=f"the server reports an error: {text}") as caught:
        parse({"error": error})
    assert caught.value.code == code


def test_more_tokens_than_asked_for_are_refused() -> None:
    parse(choice(finish_reason=None), received=7, max_tokens=9)
    with pytest.raises(ReplyError, match="10 tokens came, 9 were asked for"):
        parse(choice(finish_reason=None), received=8, max_tokens=9)


def test_routes_are_bytes_of_numpy() -> None:
    data = b"\x93NUMPY\x01\x00rest"
    ending = parse(choice(routed_experts=base64.b64encode(data).decode())).ending
    assert ending is not None
    assert ending.routed_experts == data


@pytest.mark.parametrize(
    ("read_reply", "wrong"),
    [
        (vllm_api.parse_weight_info, {"weight_version": 3}),
        (vllm_api.parse_world_size, {"world_size": "1"}),
        (vllm_api.parse_world_size, {"world_size": 0}),
        (vllm_api.parse_world_size, {"world_size": True}),
        (vllm_api.parse_model_length, {"data": []}),
        (vllm_api.parse_model_length, {"data": [{"max_model_len": 9}, {"max_model_len": 9}]}),
        (vllm_api.parse_model_length, {"data": [{"max_model_len": "9"}]}),
        (vllm_api.parse_reset, {"success": "true"}),
        (vllm_api.parse_is_paused, {"is_paused": 1}),
        (vllm_api.parse_server_version, {"version": None}),
        (vllm_api.parse_rpc, {"results": None}),
        (lambda reply: vllm_api.check_status(reply, "paused"), {"status": "resumed"}),
        (lambda reply: vllm_api.check_status(reply, "paused"), {"status": None}),
    ],
)
def test_wrong_small_replies_are_refused(read_reply: Any, wrong: Any) -> None:
    for reply in (wrong, {}, None, [], "text"):
        with pytest.raises(ReplyError):
            read_reply(reply)


def test_metrics_are_summed_over_engines() -> None:
    text = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1e1
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
other:num_requests_running 7.0
"""
    assert vllm_api.parse_metrics(text) == vllm_api.Activity(5, 10, 0.5)
    assert vllm_api.parse_metrics("nothing") == vllm_api.Activity(None, None, None)


@pytest.mark.parametrize("value", ["1e999", "1.2.3", "e"])
def test_metrics_that_are_no_numbers_are_refused(value: str) -> None:
    with pytest.raises(ReplyError, match="not a finite number"):
        vllm_api.parse_metrics(f"vllm:num_requests_running {value}\n")


@pytest.mark.parametrize(
    ("line", "payload"),
    [(b"data: {}\n", b"{}"), (b"data:{}", b"{}"), (b"data: [DONE]\r\n", b"[DONE]"), (b"\n", None), (b": ping", None)],
)
def test_lines_of_a_stream(line: bytes, payload: bytes | None) -> None:
    assert vllm_api.stream_payload(line) == payload


# Requests


def request(sampling: Sampling, **more: Any) -> dict[str, Any]:
    return vllm_api.generate_body([1, 2], sampling, "r", vocabulary=VOCABULARY, **more)


def test_every_field_that_a_model_folder_could_set_is_sent() -> None:
    sent = request(Sampling(max_tokens=9, temperature=0.5, top_p=0.9, stop_token_ids=(7,), ignore_eos=True, seed=3))
    assert (sent["request_id"], sent["token_ids"], sent["stream"], sent["cache_salt"]) == ("r", [1, 2], False, None)
    fields = sent["sampling_params"]
    # The fields of a generation_config.json that vLLM takes over as defaults.
    assert {"repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_tokens"} <= fields.keys()
    neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {"n": 1, "min_tokens": 0, "stop": [], "bad_words": [], "logit_bias": None, "logprobs": 0}
    neutral |= {"prompt_logprobs": None, "detokenize": False, "skip_special_tokens": False}
    assert {name: fields[name] for name in neutral} == neutral
    chosen = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop_token_ids": [7], "ignore_eos": True, "seed": 3}
    assert {name: fields[name] for name in chosen} == chosen
    assert json.loads(json.dumps(sent)) == sent


def test_answer_is_continued_from_the_tokens_received() -> None:
    sent = request(Sampling(max_tokens=9, seed=3), received=[11, 12], cache_salt="4", stream=True)
    assert sent["token_ids"] == [1, 2, 11, 12]
    assert sent["sampling_params"]["max_tokens"] == 7
    assert sent["sampling_params"]["seed"] == 5
    assert (sent["cache_salt"], sent["stream"]) == ("4", True)
    assert request(Sampling(max_tokens=9), received=[11])["sampling_params"]["seed"] is None
    with pytest.raises(ValueError, match="has all of its 2 tokens already"):
        request(Sampling(max_tokens=2), received=[11, 12])


@pytest.mark.parametrize("received", [[VOCABULARY], [-1]])
def test_ids_that_would_end_the_engine_are_not_sent(received: list[int]) -> None:
    with pytest.raises(ValueError, match="not all from 0 to 257"):
        request(Sampling(max_tokens=9), received=received)
    with pytest.raises(ValueError, match="or there are none"):
        vllm_api.generate_body([], Sampling(max_tokens=9), "r", vocabulary=VOCABULARY)


def test_bodies_and_paths_of_the_other_routes() -> None:
    assert vllm_api.abort_body(["a", "b"]) == {"request_ids": ["generate-tokens-a", "generate-tokens-b"]}
    with pytest.raises(ValueError, match="would abort all requests"):
        vllm_api.abort_body([])
    assert vllm_api.pause_path("keep", clear_cache=False) == "/pause?mode=keep&clear_cache=false"
    assert vllm_api.reset_prefix_cache_path(running=True) == "/reset_prefix_cache?reset_running_requests=true"
    assert vllm_api.reset_prefix_cache_path(running=False) == "/reset_prefix_cache?reset_running_requests=false"
    assert vllm_api.sleep_path(2) == "/sleep?level=2"
    assert vllm_api.wake_up_path() == "/wake_up"
    assert vllm_api.wake_up_path(["weights", "kv_cache"]) == "/wake_up?tags=weights&tags=kv_cache"
    assert vllm_api.init_weight_transfer_body({"a": 1}) == {"init_info": {"a": 1}}
    assert vllm_api.update_weights_body({"a": 1}) == {"update_info": {"a": 1}}
    assert vllm_api.finish_weight_update_body("7") == {"weight_version": "7"}
    assert vllm_api.rpc_body("weight_hashes", part=2) == {"method": "weight_hashes", "kwargs": {"part": 2}}


# Flags


def flags(fleet: FleetConfig, *, on_cpu: bool = False, routed_experts: bool = False) -> list[str]:
    options: dict[str, Any] = {"model": "m", "port": 7, "max_model_len": 64, "seed": 5}
    return server_arguments(fleet=fleet, on_cpu=on_cpu, routed_experts=routed_experts, **options)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_flags_follow_the_fleet() -> None:
    words = flags(FleetConfig(tensor=2, pipeline=3, stream_interval=48, block_size=16, max_num_seqs=9))
    expected = {
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "3",
        "--stream-interval": "48",
        "--block-size": "16",
        "--max-num-seqs": "9",
        "--max-model-len": "64",
        "--seed": "5",
        "--port": "7",
        "--dtype": "bfloat16",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--middleware": "dapo_megatron.rollout.middleware.TokenMiddleware",
    }
    assert {flag: value(words, flag) for flag in expected} == expected
    assert "--tokens-only" in words


def test_switches_are_set_only_where_asked_for() -> None:
    switches = ("--enable-expert-parallel", "--enable-return-routed-experts", "--enable-sleep-mode")
    assert not set(switches) & set(flags(FleetConfig()))
    assert switches[0] in flags(FleetConfig(expert_parallel=True))
    assert switches[1] in flags(FleetConfig(), routed_experts=True)
    assert switches[2] in flags(FleetConfig(mode="colocated"))
    assert switches[2] not in flags(FleetConfig(mode="colocated"), on_cpu=True)


def test_module_needs_the_standard_library_alone() -> None:
    script = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import dapo_megatron.rollout.vllm_api"
    # -S: no site-packages, as in an environment where nothing was ever installed.
    subprocess.run([sys.executable, "-S", "-c", script], check=True, timeout=60)


def test_recordings_are_small() -> None:
    files = [path for folder in FOLDERS for path in folder.iterdir()]
    assert max(path.stat().st_size for path in files) < 30 * 1024
    assert not [path for path in files if "/tmp" in path.read_text() or str(Path.home()) in path.read_text()]
