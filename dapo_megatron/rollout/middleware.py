"""Keeps everybody else off a vLLM server.

vLLM's own API key guards only some prefixes: the routes that pause it, read it or replace its weights
stay open. This guards all of them.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

TOKEN_VARIABLE = "DAPO_SERVER_TOKEN"
OPEN_PATHS = frozenset({"/health"})

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenMiddleware:
    """ASGI middleware: every request but those to OPEN_PATHS needs `Authorization: Bearer TOKEN`.

    The token comes from the environment, never from the command line, which any user can read. Without
    one the server refuses to start (RuntimeError).
    """

    def __init__(self, app: Application) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: a server without a token would be open to everybody")
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an allowed request on; answers others with 401 (HTTP) or close code 1008 (WebSocket)."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def _authorized(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(sent, self._expected)


async def _refuse(send: Send) -> None:
    body = json.dumps({"error": {"message": "missing or wrong bearer token", "code": 401}}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
