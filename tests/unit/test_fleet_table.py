"""`dapo-megatron fleet`: a line for each server, and an exit code."""

import asyncio
from pathlib import Path

import pytest
from config_helpers import write_config, write_model

from dapo_megatron import cli
from dapo_megatron.rollout import vllm_api
from tests.fake_server import TOKEN, FakeServer


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


async def fleet(*arguments: str) -> int:
    """The exit code of the command, which has an event loop of its own."""
    return await asyncio.to_thread(cli.main, ["fleet", *arguments])


async def test_healthy_servers(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeServer() as first, FakeServer(paused=True) as second:
        assert await fleet(first.url, second.url + "/", "--token-file", str(token)) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "URL",
        "healthy",
        "vLLM",
        "weights",
        "workers",
        "paused",
        "running",
        "waiting",
        "KV",
        "cache",
    ]
    assert lines[0].split() == [first.url, "yes", "0.32.0", "3", "1", "no", "3", "7", "50%"]
    assert lines[1].split() == [second.url, "yes", "0.32.0", "3", "1", "yes", "3", "7", "50%"]
    assert len(lines) == 2


async def test_problems_are_named_below(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        FakeServer(dead=True) as dead,
        FakeServer(open_to_all=True) as open_server,
        FakeServer(vllm="0.33.1", version=4) as new,
        FakeServer(vllm="0.29.0") as old,
    ):
        urls = [dead.url, open_server.url, new.url, old.url, "http://127.0.0.1:9"]
        assert await fleet(*urls, "--token-file", str(token)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:6]] == ["no", "no", "yes", "yes", "no"]
    below = "\n".join(lines[6:])
    assert f"{dead.url}: its engine is dead" in below
    assert f"{open_server.url}: opens without its token" in below
    assert "http://127.0.0.1:9: GET" in below
    assert "warning: vLLM 0.33.1 was not tested" in below
    assert "warning: vLLM 0.29.0 does not say which weights" in below
    assert "warning: the servers have different weights: versions 3, 4" in below


async def test_wrong_token(tmp_path: Path, token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token.write_text("guessed")
    async with FakeServer() as server:
        assert await fleet(server.url, "--token-file", str(token)) == 1
    assert "missing or wrong bearer token" in capsys.readouterr().out


async def test_servers_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    write_model(tmp_path / "model")
    async with FakeServer() as server:
        (tmp_path / "urls").write_text(f"{server.url}\n")
        external = {"mode": "external", "urls_file": str(tmp_path / "urls"), "token_env": "FLEET_TOKEN"}
        config = write_config(tmp_path, fleet=external)
        assert await fleet("--config", str(config)) == 0
    assert server.calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name servers by their URLs, or by --config"),
        (["http://127.0.0.1:9", "--config", "x.yaml"], "name servers by their URLs, or by --config"),
        (["127.0.0.1:9"], "'127.0.0.1:9' must look like"),
        (["http://127.0.0.1:9"], "DAPO_SERVER_TOKEN"),
    ],
)
def test_user_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAPO_SERVER_TOKEN", raising=False)
    assert cli.main(["fleet", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_managed_servers_have_no_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model")
    assert cli.main(["fleet", "--config", str(write_config(tmp_path))]) == 2
    assert "fleet.mode is managed" in capsys.readouterr().err


def test_metrics_that_are_not_there() -> None:
    assert vllm_api.parse_metrics("") == vllm_api.Activity(None, None, None)
