"""Rank 0 and the servers of a push, over real sockets: who is to blame, and what is left of a push that did not end."""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dapo_megatron.sync import conductor as module
from dapo_megatron.sync.conductor import Calls, Conductor
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from tests.fake_fleet import FakeServer

Start = Callable[[], "Careful"]


class Careful(FakeServer):
    """Refuses as vLLM does: an update is started once, and finished if it was started.

    While `slow` is set it answers nothing but health checks.
    """

    def __init__(self) -> None:
        super().__init__(workers=1)
        self.paused = self.updating = False
        self.slow = threading.Event()
        self.fault_at = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        route = path.partition("?")[0]
        if route != "/health":
            while self.slow.is_set():
                time.sleep(0.01)
        if route == self.fault_at:
            raise RuntimeError("out of memory")
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
        if route == "/start_weight_update":
            self._expect(not self.updating)
            self.updating = True
        if route == "/finish_weight_update":
            self._expect(self.updating)
            self.updating = False
        if route == "/collective_rpc" and body["method"] == "abandon_weight_update":
            self.updating = False
        if route == "/update_weights":
            self._expect(self.paused and self.updating)
            return {}
        if route == "/collective_rpc" and body["method"] == "received":
            return {"results": [{"hashes": [], "seconds": {}, "error": ""}]}
        return super().answer(path, body)

    def _expect(self, allowed: bool) -> None:
        if not allowed:
            raise RuntimeError("wrong order")


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Careful] = []

    def start() -> Careful:
        servers.append(Careful())
        return servers[-1]

    yield start
    for server in servers:
        server.slow.clear()
        server.close()


@contextmanager
def frozen() -> Iterator[str]:
    """The URL of a server whose kernel accepts connections, and which reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def conducting(*urls: str) -> Iterator[Conductor]:
    conductor = Conductor([(url, "token") for url in urls], timeout=30)
    try:
        yield conductor
    finally:
        conductor.close()


def late(*urls: str) -> ServerError:
    """What a request that all servers get raises when its time is up."""
    with conducting(*urls) as conductor, pytest.raises(ServerError) as caught:
        Calls(conductor.admins, lambda admin, _: ServerAdmin.resume(admin)).results(time.monotonic() + 0.5)
    assert "fleet.push_timeout" in str(caught.value)
    return caught.value


def test_of_late_servers_the_one_without_a_pulse_is_to_blame(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEALTH_SECONDS", 1.0)
    slow, other = start(), start()
    slow.slow.set()
    with frozen() as dead:
        error = late(slow.url, dead, other.url)
        assert error.url == dead
        assert str(error).startswith(f"servers {slow.url}, {dead} did not answer")
        assert not error.answered


def test_a_living_server_that_is_later_than_others_is_to_blame(start: Start) -> None:
    servers = [start() for _ in range(3)]
    for server in servers[1:]:
        server.slow.set()
    assert late(*(server.url for server in servers)).url == servers[1].url
    assert late(servers[2].url).url == servers[2].url  # there is nobody else


def test_nobody_is_to_blame_where_all_servers_live_and_are_late(start: Start) -> None:
    servers = [start() for _ in range(2)]
    for server in servers:
        server.slow.set()
    error = late(*(server.url for server in servers))
    assert error.url == ""
    for server in servers:
        assert server.url in str(error)


def test_answers_that_come_at_the_last_moment_blame_nobody(start: Start) -> None:
    with conducting(start().url) as conductor:
        calls = Calls(conductor.admins, lambda admin, _: admin.world_size())
        calls.settled(math.inf)
        assert calls.culprit(ServerError("late"), grace=0).url == ""


def test_a_push_left_in_the_middle_stays_paused_until_another_run_pushes(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    with caplog.at_level(logging.WARNING), conducting(server.url) as first:
        first.prepare(1, math.inf)
        first.begin({}, math.inf, held=False).results(math.inf)
    assert f"a push did not end on servers {server.url}: they stay paused" in caplog.text
    assert server.paused  # half of its weights would be anything
    assert server.updating
    caplog.clear()
    with conducting(server.url) as second:
        second.prepare(1, math.inf)
        assert server.paused
        second.begin({}, math.inf, held=False).results(math.inf)
        second.finish(4, math.inf, held=False)
    assert not server.paused
    assert not caplog.text


def test_servers_that_cannot_be_finished_are_named_and_others_go_on(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = start(), start()
    bad.fault_at = "/finish_weight_update"
    with caplog.at_level(logging.WARNING), conducting(good.url, bad.url) as conductor:
        conductor.begin({}, math.inf, held=False).results(math.inf)
        with pytest.raises(ServerError, match="out of memory") as caught:
            conductor.finish(1, math.inf, held=False)
        while good.paused:  # its own request goes on
            time.sleep(0.01)
        time.sleep(0.1)
    assert caught.value.url == bad.url
    assert bad.paused
    assert f"on servers {bad.url}: they stay paused" in caplog.text


def test_weights_that_are_not_live_after_a_push_are_an_error(start: Start) -> None:
    server = start()
    with conducting(server.url) as conductor:
        conductor.begin({}, math.inf, held=False).results(math.inf)
        server.versions.append(7)
        honest = server.answer
        server.answer = lambda path, body: {} if path == "/finish_weight_update" else honest(path, body)  # type: ignore[method-assign]
        with pytest.raises(ServerError, match="has weights of version 7 after a push of version 8") as caught:
            conductor.finish(8, math.inf, held=False)
    assert caught.value.url == server.url
    assert server.paused
