"""The installed vLLM answers in the shapes that were recorded: an upgrade that breaks the adapter is seen here."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from dapo_megatron.rollout import vllm_api
from tests.fleet.conftest import RunningServer
from tests.fleet.tiny import VOCABULARY
from tests.models import REPOSITORY
from tools.record_vllm_replies import LONG, SHORT, Reply, record

# The newest tested version; recorded in the order of their names.
RECORDED = max((REPOSITORY / "tests" / "contract").iterdir())
NAMES = sorted(path.name for path in RECORDED.iterdir())


@pytest.fixture(scope="module")
def replies(running: RunningServer) -> dict[str, Reply]:
    return asyncio.run(record(running.url, running.token))


def differences(recorded: Any, live: Any, where: str = "reply") -> list[str]:
    """What `live` lacks of `recorded`, or has of another type. Both may be null for any type; more keys may come."""
    if recorded is None or live is None:
        return []
    if isinstance(recorded, dict) and isinstance(live, dict):
        found = [f"{where}.{key} is gone" for key in recorded.keys() - live.keys()]
        common = recorded.keys() & live.keys()
        return found + [text for key in common for text in differences(recorded[key], live[key], f"{where}.{key}")]
    if isinstance(recorded, list) and isinstance(live, list):
        return differences(recorded[0], live[0], f"{where}[0]") if recorded and live else []
    same = type(recorded) is type(live) or {type(recorded), type(live)} == {int, float}
    return [] if same else [f"{where} is a {type(live).__name__}, was a {type(recorded).__name__}"]


def messages(stream: str) -> list[Any]:
    """Decoded messages of a stream, and DONE as text."""
    payloads = [vllm_api.stream_payload(line) for line in stream.encode().splitlines()]
    return [it.decode() if it == vllm_api.DONE else json.loads(it) for it in payloads if it is not None]


def ends(stream: str) -> list[Any]:
    """The first message, the last, and what comes after: how many lie between depends on the speed of the server."""
    all_of_them = messages(stream)
    return [all_of_them[0], *all_of_them[-2:]]


@pytest.mark.parametrize("name", NAMES)
def test_reply_has_the_recorded_shape(name: str, replies: dict[str, Reply]) -> None:
    stem, _, kind = name.rpartition(".")
    text = (RECORDED / name).read_text()
    reply = replies[stem]
    if kind == "sse":
        assert [it for pair in zip(ends(text), ends(reply.body), strict=True) for it in differences(*pair)] == []
    else:
        recorded = json.loads(text)
        assert reply.status == recorded["status"]
        assert differences(recorded["body"], reply.body) == []


def test_everything_recorded_is_asked_for(replies: dict[str, Reply]) -> None:
    assert {name.rpartition(".")[0] for name in NAMES} == replies.keys()


def test_installed_version_is_tested(replies: dict[str, Reply]) -> None:
    assert vllm_api.warn_if_untested(vllm_api.parse_server_version(replies["version"].body)) is None


@pytest.mark.parametrize(
    ("name", "tokens", "reason"),
    [
        ("stream", SHORT.max_tokens, "length"),
        ("stream_paused", LONG.max_tokens, "length"),
        ("stream_aborted", None, "abort"),
    ],
)
def test_live_streams_are_read(name: str, tokens: int | None, reason: str, replies: dict[str, Reply]) -> None:
    received = 0
    *pieces, done = messages(replies[name].body)
    assert done == vllm_api.DONE.decode()
    for message in pieces:
        chunk = vllm_api.parse_chunk(message, received=received, max_tokens=LONG.max_tokens, vocabulary=VOCABULARY)
        received += len(chunk.token_ids)
    assert chunk.ending is not None
    assert chunk.ending.finish_reason == reason
    assert sum(count for _, count in chunk.ending.spans) == received
    assert received < LONG.max_tokens if tokens is None else received == tokens


def test_live_answer_is_that_of_the_stream(replies: dict[str, Reply]) -> None:
    answer = vllm_api.parse_answer(replies["answer"].body, max_tokens=SHORT.max_tokens, vocabulary=VOCABULARY)
    pieces = messages(replies["stream"].body)[:-1]
    assert answer[0] == [token for piece in pieces for token in piece["choices"][0]["token_ids"]]


def test_metrics_have_the_names_that_are_read(running: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {running.token}"}
    reply = httpx.get(running.url + vllm_api.METRICS, headers=headers, trust_env=False)
    assert vllm_api.parse_metrics(reply.raise_for_status().text) == vllm_api.Activity(0, 0, 0.0)


def test_a_paused_server_forgets_only_when_told_about_running_requests(replies: dict[str, Reply]) -> None:
    assert vllm_api.parse_is_paused(replies["is_paused_yes"].body)
    assert not vllm_api.parse_reset(replies["reset_refused"].body)
    assert vllm_api.parse_reset(replies["reset_running"].body)


def test_differences_are_found() -> None:
    recorded = {"a": [{"b": 1, "c": None}], "d": 0.5}
    assert differences(recorded, {"a": [{"b": 2, "c": "x", "e": 1}], "d": 1}) == []
    assert differences(recorded, {"a": [{"b": "2", "c": 1}], "d": 1}) == ["reply.a[0].b is a str, was a int"]
    assert differences(recorded, {"a": [], "f": 1}) == ["reply.d is gone"]
    assert differences(True, 1) == ["reply is a int, was a bool"]
