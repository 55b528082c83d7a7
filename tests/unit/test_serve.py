"""`dapo-megatron serve` up to the server itself, which tests/fleet starts."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron import cli, serve
from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.errors import UserError
from tests.models import REPOSITORY
from tests.unit.config_helpers import write_config, write_model


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return write_config(tmp_path, fleet={"port": 9000, "host": "127.0.0.1", "token_env": "MY_TOKEN"})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a server would have been started with; the start then fails."""
    arguments: dict[str, Any] = {}

    def start_server(**given: Any) -> None:
        arguments.update(given)
        raise UserError("stop here")

    monkeypatch.setattr(serve, "start_server", start_server)
    return arguments


def test_server_is_the_one_that_the_run_would_start(
    config_file: Path, started: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert cli.main(["serve", str(config_file), "run.seed=7", "--index", "3"]) == 2
    assert isinstance(started.pop("fleet"), FleetConfig)
    assert started == {
        "model": str(tmp_path / "model"),
        "index": 3,
        "port": 9003,
        "max_model_len": 136,
        "seed": 7,
        "log_path": tmp_path / "run" / "logs" / "server_3.log",
        "token": "secret",
        "first_gpu": None,  # those that this process sees
        "routed_experts": False,
        "dummy_weights": False,
        "hf_overrides": None,
    }


def test_server_holds_answers_that_go_past_the_most_tokens(
    config_file: Path, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    longer = ["algorithm.overlong.shift=past_max", "algorithm.overlong.cache_tokens=16"]
    assert cli.main(["serve", str(config_file), *longer]) == 2
    assert started["max_model_len"] == 128 + 8 + 16


def test_host_and_port_can_be_given(config_file: Path, started: dict[str, Any], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-file\n")
    options = ["--index", "3", "--host", "10.0.0.7", "--port", "8001", "--token-file", str(token)]
    assert cli.main(["serve", str(config_file), *options]) == 2
    assert (started["fleet"].host, started["port"], started["token"]) == ("10.0.0.7", 8001, "from-file")


@pytest.mark.parametrize("fleet", [{"mode": "managed", "servers": 3}, {"mode": "colocated"}])
def test_no_two_servers_sample_with_the_same_seed(
    config_file: Path, started: dict[str, Any], fleet: dict[str, Any]
) -> None:
    config = load_config(config_file)
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update=fleet)})
    seeds = set()
    for index, restarts in itertools.product(range(3), repeat=2):
        with pytest.raises(UserError, match="stop here"):
            serve.start(config, index, "secret", restarts=restarts)
        seeds.add(started["seed"] + started["index"])  # as `start_server` has it
    assert len(seeds) == 9


def test_missing_model_is_told(config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    options = ["model.path=nowhere", "--token-file", str(tmp_path / "token")]
    assert cli.main(["serve", str(config_file), *options]) == 2
    assert capsys.readouterr().err == "dapo-megatron: model.path: the folder nowhere does not exist\n"


def test_without_a_token_nothing_starts(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(config_file)]) == 2
    assert "the environment variable MY_TOKEN (fleet.token_env) holds no token" in capsys.readouterr().err
    file = tmp_path / "token"
    with pytest.raises(UserError, match=r"--token-file .* cannot be read: No such file"):
        serve.read_token(file, "MY_TOKEN")
    file.write_text("\n")
    with pytest.raises(UserError, match=r"--token-file .* holds no token"):
        serve.read_token(file, "MY_TOKEN", {"MY_TOKEN": "secret"})
    file.write_text("two words")
    with pytest.raises(UserError, match="must hold one word"):
        serve.read_token(file, "MY_TOKEN")


def test_the_servers_environment_is_enough() -> None:
    """Besides what vLLM brings (pydantic, PyYAML), `serve` needs OmegaConf alone."""
    script = "import sys, dapo_megatron.cli, dapo_megatron.serve; print(*{n.partition('.')[0] for n in sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=60
    ).stdout
    ours = {"aiohttp", "datasets", "httpx", "jinja2", "megatron", "numpy", "orjson", "psutil", "rich", "safetensors"}
    ours |= {"scipy", "tokenizers", "torch", "transformers"}
    assert "omegaconf" in output.split()
    assert not ours & set(output.split())
