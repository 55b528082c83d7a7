"""What the trainer makes of a server's replies to a push."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dapo_megatron.sync.conductor import Conductor
from dapo_megatron.sync.group import BROKEN_OFF
from dapo_megatron.sync.server_admin import Received, ServerAdmin, ServerError

URL = "http://server"
ANSWERS: dict[str, Any] = {
    "/finish_weight_update": {},
    "/weight_info": {"weight_version": "3"},
    "/collective_rpc": {"results": ["", ""]},
    "/update_weights": {},
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/reset_prefix_cache": {"success": True},
}

Serve = Callable[..., list[str]]


@pytest.fixture
def conductor() -> Conductor:
    return Conductor([(URL, "token")], timeout=5)


@pytest.fixture
def admin(conductor: Conductor) -> ServerAdmin:
    return conductor.admins[0]


@pytest.fixture
def serve(admin: ServerAdmin) -> Serve:
    """Lets the server answer as ANSWERS and `changes` say; returns the requests that it gets, as they come."""

    def serve(**changes: Any) -> list[str]:
        answers, asked = ANSWERS | {f"/{path}": reply for path, reply in changes.items()}, []

        def answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.raw_path.decode())
            reply = answers.get(request.url.path, {})
            return reply if isinstance(reply, httpx.Response) else httpx.Response(200, json=reply)

        admin._client = httpx.Client(base_url=URL, transport=httpx.MockTransport(answer))
        return asked

    return serve


def received(*errors: str) -> dict[str, Any]:
    return {"results": [{"hashes": [7], "seconds": {"load": 0.5}, "error": error} for error in errors]}


def test_what_each_worker_received_is_returned(serve: Serve, admin: ServerAdmin) -> None:
    asked = serve(collective_rpc=received("", ""))
    assert admin.update_weights({}) == [Received([7], {"load": 0.5}, "")] * 2
    assert asked == ["/update_weights", "/collective_rpc"]


def test_a_worker_that_failed_is_named_before_one_that_was_left_alone(serve: Serve, admin: ServerAdmin) -> None:
    serve(collective_rpc=received("", f"{BROKEN_OFF}: reset", "no such tensor"))
    with pytest.raises(ServerError, match=r"/update_weights failed on worker 2: no such tensor") as caught:
        admin.update_weights({})
    assert caught.value.url == URL
    serve(collective_rpc=received("", f"{BROKEN_OFF}: reset"))
    with pytest.raises(ServerError, match=f"worker 1: {BROKEN_OFF}"):
        admin.update_weights({})


@pytest.mark.parametrize("call", ["init_weight_transfer_engine", "finish_weight_update"])
def test_workers_are_asked_what_went_wrong(serve: Serve, admin: ServerAdmin, call: str) -> None:
    asked = serve()
    getattr(admin, call)({} if call.startswith("init") else 3)
    assert asked == [f"/{call}", "/collective_rpc"]
    serve(collective_rpc={"results": ["", "out of memory"]})
    with pytest.raises(ServerError, match=f"POST /{call} failed on worker 1: out of memory"):
        getattr(admin, call)({} if call.startswith("init") else 3)


PAUSE, RESET = "/pause?mode=keep&clear_cache=false", "/reset_prefix_cache?reset_running_requests=true"
FINISH = ["/finish_weight_update", "/collective_rpc"]


def test_a_server_computes_nothing_with_half_of_its_weights(serve: Serve, conductor: Conductor) -> None:
    calls = serve(collective_rpc=received(""))
    conductor.begin({}, float("inf"), held=False).results(float("inf"))
    assert calls == [PAUSE, "/start_weight_update", "/update_weights", "/collective_rpc"]
    calls = serve()
    conductor.finish(3, float("inf"), held=False)
    assert calls == [*FINISH, "/weight_info", RESET, "/resume"]


def test_a_server_that_is_held_stays_so_and_keeps_keys_and_values(serve: Serve, conductor: Conductor) -> None:
    calls = serve(collective_rpc=received(""))
    conductor.begin({}, float("inf"), held=True).results(float("inf"))
    assert calls == ["/start_weight_update", "/update_weights", "/collective_rpc"]
    calls = serve()
    conductor.finish(3, float("inf"), held=True)
    assert calls == [*FINISH, "/weight_info"]


def test_a_server_without_the_weights_does_not_go_on(serve: Serve, conductor: Conductor) -> None:
    calls = serve(collective_rpc={"results": ["", "out of memory"]})
    with pytest.raises(ServerError, match="out of memory"):
        conductor.finish(3, float("inf"), held=False)
    assert calls == FINISH


def test_a_cache_that_cannot_be_reset_is_an_error(serve: Serve, admin: ServerAdmin) -> None:
    serve(reset_prefix_cache={"success": False})
    with pytest.raises(ServerError, match="the prefix cache cannot be reset"):
        admin.reset_prefix_cache()


@pytest.mark.parametrize(
    "reply", [{}, [], {"results": 1}, {"results": [{"hashes": []}]}, httpx.Response(200, content=b"<html>")]
)
def test_replies_of_another_shape_are_errors_of_the_server(serve: Serve, admin: ServerAdmin, reply: Any) -> None:
    serve(collective_rpc=reply, get_world_size=reply, weight_info=reply)
    for call in (lambda: admin.update_weights({}), admin.world_size, admin.weight_version):
        with pytest.raises(ServerError, match=f"server {URL}"):
            call()


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (httpx.Response(400, json={"error": {"message": "no such engine"}}), r"failed \(400\): no such engine"),
        (httpx.Response(502, content=b"bad gateway"), r"failed \(502\): bad gateway"),
    ],
)
def test_a_refusal_is_quoted(serve: Serve, admin: ServerAdmin, reply: httpx.Response, text: str) -> None:
    serve(start_weight_update=reply)
    with pytest.raises(ServerError, match=text):
        admin.start_weight_update()
