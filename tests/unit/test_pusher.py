"""A push that ends with the trainer: servers are not left to wait for it."""

import time
from pathlib import Path

import pytest
from torch import Tensor

from dapo_megatron.models.parameters import Parameter
from dapo_megatron.sync.group import BROKEN_OFF
from tests.fake_fleet import FakeServer, fake_fleet
from tests.models import tiny_model
from tests.pushing import Push, TensorSource, plan_of

TIMEOUT = 60.0  # seconds, after which servers would give up by themselves


class Ends(TensorSource):
    """The trainer ends when its weights are asked for."""

    def gather(self, row: Parameter) -> list[Tensor]:
        raise KeyboardInterrupt


def error_of(server: FakeServer) -> str:
    found: list[dict[str, str]] = server.answer("/collective_rpc", {"method": "received"})["results"]
    return found[0]["error"]


def test_servers_do_not_wait_for_a_trainer_that_ends_in_a_push(tmp_path: Path) -> None:
    plan = plan_of(tiny_model(tmp_path / "model", "llama"))
    with fake_fleet(2, workers=1) as servers:
        push = Push(plan, [(server.url, "token") for server in servers], timeout=TIMEOUT)
        push.connect()
        push.pusher._sender._source = Ends()
        with pytest.raises(KeyboardInterrupt):
            push.pusher.push(1)
        end = time.monotonic() + TIMEOUT / 3
        while not all(BROKEN_OFF in error_of(server) for server in servers):
            assert time.monotonic() < end, "they still wait"
            time.sleep(0.05)
        push.close()
