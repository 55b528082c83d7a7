"""Servers without vLLM: the receiver's own code behind vLLM's weight routes, in threads of this process."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from dapo_megatron.sync.inbox import Inbox
from dapo_megatron.sync.wire import Stretch


class FakeServer:
    """A server with `workers` workers, which keep what they receive.

    Attributes:
        received: for each worker the stretches of the last push.
        versions: of all pushes that were finished.
        calls: all requests, in their order.
        fault: called by every worker for each bucket that it has received.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.received: list[list[tuple[Stretch, Tensor]]] = []
        self.versions: list[int] = []
        self.calls: list[str] = []
        self.fault: Callable[[int], None] = lambda worker: None
        self._inboxes: list[Inbox] = []
        self._errors = [""] * workers
        self._pool = ThreadPoolExecutor(workers)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        """Stops listening and leaves all groups, as a process that dies."""
        self._http.shutdown()
        self._http.server_close()
        for inbox in self._inboxes:
            inbox.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """What vLLM answers."""
        self.calls.append(path)
        if path == "/get_world_size":
            return {"world_size": self.workers}
        if path == "/weight_info":
            return {"weight_version": str(self.versions[-1])}
        if path == "/init_weight_transfer_engine":
            for inbox in self._inboxes:
                inbox.close()
            self._errors = [""] * self.workers
            info = body["init_info"]
            self._inboxes = list(self._pool.map(lambda worker: Inbox(worker, **info), range(self.workers)))
        if path == "/update_weights":
            self.received = list(self._pool.map(self._receive, range(self.workers)))
        if path == "/finish_weight_update":
            self.versions.append(int(body["weight_version"]))
        if path == "/collective_rpc" and body["method"] == "received":
            found = zip(self._inboxes, self._errors, strict=True)
            return {"results": [{"hashes": b.hashes, "seconds": b.seconds, "error": error} for b, error in found]}
        status = {"/pause": "paused", "/resume": "resumed"}.get(path.partition("?")[0], "")
        return {"results": self._errors, "success": True, "status": status}

    def _receive(self, worker: int) -> list[tuple[Stretch, Tensor]]:
        found = []
        self._errors[worker] = ""
        try:
            for stretches in self._inboxes[worker].receive():
                if not self._errors[worker]:
                    self._fail(worker)
                found += stretches
        except RuntimeError as error:
            self._errors[worker] = self._errors[worker] or str(error)
        return found

    def _fail(self, worker: int) -> None:
        try:
            self.fault(worker)
        except ConnectionAbortedError:
            raise
        except Exception as error:
            self._errors[worker] = repr(error)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the name is the standard library's
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                try:
                    self._reply(200, server.answer(self.path, body))
                except ConnectionAbortedError:
                    self.close_connection = True  # as a process that dies: no answer at all
                except Exception as error:
                    self._reply(500, {"error": {"message": str(error)}})

            do_GET = do_POST  # noqa: N815

            def _reply(self, status: int, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@contextmanager
def fake_fleet(count: int, workers: int) -> Iterator[list[FakeServer]]:
    """`count` servers with `workers` workers each."""
    servers = [FakeServer(workers) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
