"""One real vLLM server with a tiny model, shared by all tests of this folder."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.rollout.server import Server, start_server, stop_server, wait_until_healthy
from tests.fleet.tiny import load, weights, write_tiny_model
from tests.pushing import Push, plan_of

if TYPE_CHECKING:
    from dapo_megatron.trainer.parallel import Layout

MAX_MODEL_LEN = 256
LEAST_SHARE, MOST_SHARE = 0.15, 0.85
START_SECONDS = 240  # on an idle machine it takes 25


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that runs also waits for the server."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(START_SECONDS + 60))


@dataclass(frozen=True)
class RunningServer:
    server: Server
    token: str
    model: Path

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="session")
def tiny_fleet() -> FleetConfig:
    """Settings of the shared server: fp32, so that it can be compared with transformers."""
    return FleetConfig(dtype="float32", kv_cache_gb=0.03, max_num_seqs=16, block_size=32)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def running(
    tiny_model: Path, tiny_fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    token = secrets.token_hex(16)
    server = start_server(
        model=str(tiny_model),
        index=0,
        port=None,
        fleet=tiny_fleet,
        max_model_len=MAX_MODEL_LEN,
        seed=1,
        log_path=tmp_path_factory.mktemp("logs") / "server_0.log",
        token=token,
    )
    try:
        wait_until_healthy(server, timeout=START_SECONDS)
        yield RunningServer(server, token, tiny_model)
    finally:
        stop_server(server)


@pytest.fixture(scope="module")
def restored(running: RunningServer) -> Iterator[RunningServer]:
    """The shared server, which afterwards has the weights of its folder again."""
    yield running
    restore = Push(plan_of(running.model), [(running.url, running.token)])
    try:
        restore.connect()
        restore(weights(load(running.model)), 0)
    finally:
        restore.close()


@pytest.fixture(scope="module")
def borrowed(restored: RunningServer, tiny_fleet: FleetConfig) -> Iterator[list[str]]:
    """Overrides of a run that trains with the shared server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tiny_fleet.token_env, restored.token)
        yield ["fleet.mode=external", f"fleet.urls=[{restored.url}]"]


@pytest.fixture(scope="module")
def layout() -> "Iterator[Layout]":
    """A world of this process alone."""
    import torch.distributed as dist

    from dapo_megatron.config.training import ParallelConfig
    from dapo_megatron.trainer import parallel

    yield parallel.initialize(ParallelConfig.model_validate({}), seed=1, threads=1)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def task(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts of `write_task` for the shared server's model."""
    return write_task(tiny_model, tmp_path_factory.mktemp("task"))


def write_task(folder: Path, to: Path) -> Path:
    """Prompts whose gold answer is a character that a random model says next now and then, but not always."""
    model, tokenizer = load(folder), Tokenizer(folder)
    rows = []
    for number in range(200):
        prompt = f"{number:03d}" * 12
        ids = tokenizer.encode_prompts([prompt])[0]
        with torch.no_grad():
            shares = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
        best = int(shares[:94].argmax())  # the printable characters of ASCII stand first
        if LEAST_SHARE < shares[best] < MOST_SHARE:
            rows.append({"prompt": prompt, "reward_model": {"ground_truth": tokenizer.decode([best])}})
    assert len(rows) >= 10, "the random model is too sure or too unsure everywhere"
    path = to / "task.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
