"""What a vLLM server says about itself, as a process that can be killed and frozen: `stub_server.py PORT`."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "secret"


def replies(*, workers: int = 1, length: int = 256, version: str = "0.32.0") -> dict[str, Any]:
    return {
        "/version": {"version": version},
        "/get_world_size": {"world_size": workers},
        "/v1/models": {"data": [{"id": "m", "max_model_len": length}]},
    }


class Stub(BaseHTTPRequestHandler):
    """Opens with TOKEN alone, unless `guarded` is off; `health` is the status of /health."""

    answers = replies()
    guarded = True
    health = 200
    health_body = b""
    generates = False

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(self.health, self.health_body)
        elif self.guarded and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b'{"error": {"message": "missing or wrong bearer token"}}')
        elif self.path in self.answers:
            self._send(200, json.dumps(self.answers[self.path]).encode())
        else:
            self._send(404, b"{}")

    def do_POST(self) -> None:
        """GENERATE, where `generates`: one token."""
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {
            "index": 0,
            "token_ids": [1],
            "logprobs": {"content": [{"token": "1", "logprob": -1.0}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "default", "start": 0, "end": 1}],
        }
        stream = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        self._send(200 if self.generates else 500, stream.encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def stub(**attributes: Any) -> Iterator[str]:
    """The URL of a stub in this process, with other attributes than `Stub` has."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Changed", (Stub,), attributes))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    print("the stub starts", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Stub).serve_forever()
