"""Trainer and servers that share GPUs: who has the memory when, and what is said when it is not enough."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.rollout import supervisor
from dapo_megatron.rollout.requests import Server
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from dapo_megatron.trainer import colocated, device
from dapo_megatron.trainer.colocated import Turns
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import load_batch, make_config
from tests.fake_fleet import FakeServer
from tests.training import differing


class SleepyServer(FakeServer):
    """Answers as vLLM does to requests to sleep and to wake up."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asleep: set[str] = set()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        route, _, query = path.partition("?")
        if route == "/sleep":
            time.sleep(0.1)
            self.asleep = {"weights", "kv_cache"}
        elif route == "/wake_up":
            self.asleep -= {query.partition("=")[2]}
        super().answer(path, body)
        return {"status": "sleeping" if self.asleep else "awake"}


class Model:
    """Notes when its gradients have memory."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def free_gradients(self) -> None:
        self.log.append("free")

    def allocate_gradients(self) -> None:
        self.log.append("allocate")


@pytest.fixture
def servers() -> Iterator[list[SleepyServer]]:
    made = [SleepyServer(), SleepyServer()]
    yield made
    for server in made:
        server.close()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "on_rank_zero", lambda function: function())


def named(servers: list[SleepyServer]) -> list[Server]:
    return [Server(f"server_{number}", server.url, "token") for number, server in enumerate(servers)]


def test_servers_and_gradients_take_turns(servers: list[SleepyServer]) -> None:
    model = Model()
    turns = Turns([model, model], timeout=10)  # type: ignore[list-item]
    assert model.log == ["free", "free"]
    turns.take_weights(named(servers))  # at the start they are awake
    turns.generate(named(servers))
    turns.train(named(servers))
    assert model.log[-2:] == ["allocate", "allocate"]
    assert all(server.asleep == {"weights", "kv_cache"} for server in servers)
    turns.take_weights(named(servers))
    assert model.log[-2:] == ["free", "free"]
    assert all(server.asleep == {"kv_cache"} for server in servers)
    turns.generate(named(servers))
    assert not any(server.asleep for server in servers)
    rounds = ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert servers[0].calls == [*rounds, "/sleep?level=2", *rounds]


def test_training_does_not_begin_without_memory(servers: list[SleepyServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """What training took at most, beyond what stays while servers generate, must be free again."""
    free = 3 << 30
    monkeypatch.setattr(device, "free_memory", lambda: free)
    monkeypatch.setattr(device, "peak_growth", lambda: 3 << 30)
    model = Model()
    turns = Turns([model], timeout=10)  # type: ignore[list-item]
    turns.train(named(servers))
    free -= 1
    model.log.clear()
    with pytest.raises(RuntimeError, match=r"training needs 3\.0 GiB of the GPU, but 3\.0 GiB are free while"):
        turns.train(named(servers))
    assert model.log == []


def test_server_that_has_died_does_not_stop_the_training(
    servers: list[SleepyServer], caplog: pytest.LogCaptureFixture
) -> None:
    turns = Turns([], timeout=10)
    gone = named(servers)
    servers[1].close()
    turns.train(gone)
    assert "a server does not go to sleep" in caplog.text
    turns.train(gone[::-1])  # the others sleep before training begins, also when it fails first
    assert servers[0].calls == ["/sleep?level=2"] * 2
    for request in (turns.take_weights, turns.generate):
        with pytest.raises(ServerError) as caught:
            request(gone[1:])
        assert caught.value.url == gone[1].url


def test_server_that_does_not_wake_up_is_named(servers: list[SleepyServer]) -> None:
    admin = ServerAdmin(servers[0].url, "token", 10)
    admin.sleep()
    with pytest.raises(ServerError, match=r"POST /wake_up\?tags=kv_cache: status is 'sleeping' instead of 'awake'"):
        admin.wake_cache()
    admin.wake_weights()
    admin.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_the_same_when_gradients_had_no_memory_between_steps(
    layout: Layout, checkpoint: Callable[..., Path], precision: str
) -> None:
    policies = []
    for frees in (False, True):
        policy = Policy(make_config(checkpoint(), training={"precision": precision}), layout)
        for seed in range(2):
            if frees:
                policy.free_gradients()
                assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in policy.ddp[0].buffers)
                policy.free_gradients()
            batch = load_batch(policy, seed=seed)
            batch.set_old_log_probs(policy.log_probs(batch))
            if frees:
                policy.allocate_gradients()
            policy.start_step()
            for mini_batch in batch.mini_batches():
                assert policy.update(mini_batch)["grad_norm"] > 0
        policies.append(policy)
    assert differing(policies[1], policies[0]) == []


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert device.free_memory() is None
    assert device.peak_growth() == 0


async def test_servers_take_the_gpus_of_the_trainers_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(supervisor, "start", lambda *_, first_gpu, restarts: first_gpu)
    for mode, count, gpus in (("colocated", 2, [0, 2]), ("managed", 3, [4, 6])):
        fleet = {"mode": mode, "tensor": 2} | ({"servers": 3} if mode == "managed" else {})
        config = make_config(tmp_path, fleet=fleet)
        made = supervisor.Supervisor(config, *[None] * 4)  # type: ignore[arg-type]
        assert made._count() == count
        assert list[Any](made._start(index, 0) for index in range(2)) == gpus
        await made.close()
