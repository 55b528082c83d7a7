"""Who may talk to a real server."""

import httpx
import pytest

from tests.fleet.conftest import RunningServer

GUARDED = [
    ("POST", "/inference/v1/generate"),
    ("POST", "/inference/v1/abort_requests"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/collective_rpc"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/pause"),
    ("GET", "/weight_info"),
    ("GET", "/server_info"),
    ("GET", "/metrics"),
    ("GET", "/no/such/route"),
]


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}], ids=["no token", "wrong token"])
@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_routes_refuse_strangers(running: RunningServer, method: str, path: str, header: dict[str, str]) -> None:
    reply = httpx.request(method, running.url + path, headers=header, trust_env=False)
    assert reply.status_code == 401
    assert reply.json()["error"]["message"] == "missing or wrong bearer token"


def test_health_is_open(running: RunningServer) -> None:
    assert httpx.get(running.url + "/health", trust_env=False).status_code == 200


def test_token_opens_the_other_routes(running: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {running.token}"}
    assert httpx.get(running.url + "/weight_info", headers=headers, trust_env=False).status_code == 200


def test_token_is_not_on_the_command_line(running: RunningServer) -> None:
    assert running.token not in " ".join(map(str, running.server.process.args))  # type: ignore[arg-type]
