"""The token middleware, driven as an ASGI server would."""

from typing import Any

import pytest

from dapo_megatron.rollout.middleware import TOKEN_VARIABLE, TokenMiddleware

BEARER = [(b"authorization", b"Bearer secret")]


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "passed"})


async def answers(scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await TokenMiddleware(application)(scope, receive, send)
    return sent


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_token_opens_a_route(kind: str) -> None:
    assert await answers({"type": kind, "path": "/pause", "headers": BEARER}) == [{"type": "passed"}]


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")], [(b"authorization", b"")]],
)
@pytest.mark.parametrize("path", ["/pause", "/inference/v1/generate", "/health/", "/healthy", "/v1/health"])
async def test_stranger_gets_401(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    start, body = await answers({"type": "http", "path": path, "headers": headers})
    assert start["status"] == 401
    assert b"bearer token" in body["body"]


async def test_stranger_gets_no_websocket() -> None:
    assert await answers({"type": "websocket", "path": "/v1/realtime", "headers": []}) == [
        {"type": "websocket.close", "code": 1008}
    ]


async def test_health_and_lifespan_are_open() -> None:
    assert await answers({"type": "http", "path": "/health", "headers": []}) == [{"type": "passed"}]
    assert await answers({"type": "lifespan"}) == [{"type": "passed"}]


@pytest.mark.parametrize("token", [None, ""])
def test_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    if token is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(RuntimeError, match="DAPO_SERVER_TOKEN is not set"):
        TokenMiddleware(application)
