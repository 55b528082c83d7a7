"""Trainer and servers that share GPUs: who has the memory when, and what is said when it is not enough."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron import train as training
from dapo_megatron.monitoring import console
from dapo_megatron.rollout import supervisor
from dapo_megatron.rollout.requests import Server
from dapo_megatron.run_state.checkpoint import RunState, _ensure_adam_state
from dapo_megatron.run_state.store import DP_RESHARDABLE, FULLY_RESHARDABLE
from dapo_megatron.sync.server_admin import ServerAdmin, ServerError
from dapo_megatron.trainer import colocated, device
from dapo_megatron.trainer.colocated import Turns, give_memory
from dapo_megatron.trainer.host_memory import HostMemory
from dapo_megatron.trainer.learner import Learner
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.batches import load_batch, make_config
from tests.fake_fleet import FakeServer
from tests.training import differing, tensors


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
    """Notes when it has the memory for updates."""

    BYTES = 1 << 30

    def __init__(self) -> None:
        self.log: list[str] = []

    def give_memory(self) -> int:
        self.log.append("give")
        return self.BYTES

    def take_memory(self) -> None:
        self.log.append("take")


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


def test_servers_and_training_take_turns(servers: list[SleepyServer]) -> None:
    model = Model()
    turns = Turns([model, model], timeout=10)  # type: ignore[list-item]
    assert model.log == ["give", "give"]
    turns.take_weights(named(servers))
    turns.generate(named(servers))
    turns.train(named(servers))
    assert model.log[2:] == ["take", "take"]
    assert all(server.asleep == {"weights", "kv_cache"} for server in servers)
    turns.take_weights(named(servers))
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
    turns.take_weights(named(servers))
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


def trained(layout: Layout, model: Path, precision: str, *, gives: bool) -> Policy:
    """Two steps; with `gives`, the memory that only updates need is given up before and after each."""
    policy = Policy(make_config(model, training={"precision": precision}), layout)
    for seed in range(2):
        if gives:
            policy.give_memory()
        batch = load_batch(policy, seed=seed)
        batch.set_old_log_probs(policy.log_probs(batch))  # needs the weights alone
        policy.take_memory()
        policy.start_step()
        for mini_batch in batch.mini_batches():
            assert policy.update(mini_batch)["grad_norm"] > 0
    return policy


def places(policy: Policy) -> dict[str, int]:
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors(policy) if "rate" not in name}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_the_same_when_its_memory_was_given_up_between_steps(
    layout: Layout, checkpoint: Callable[..., Path], precision: str
) -> None:
    kept, gave = (trained(layout, checkpoint(), precision, gives=gives) for gives in (False, True))
    assert differing(gave, kept) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_that_only_updates_need_is_given_up(
    layout: Layout, checkpoint: Callable[..., Path], precision: str
) -> None:
    policy = trained(layout, checkpoint(), precision, gives=False)
    before = places(policy)
    count = sum(parameter.numel() for parameter in policy.chunks[0].parameters())
    # fp32 gradients and two moments; masters where they are not the weights themselves. Buffers are padded.
    needed = count * 4 * (3 if precision == "fp32" else 4)
    assert needed <= policy.give_memory() <= needed * 1.05
    assert policy.give_memory() == 0
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in policy.ddp[0].buffers)
    moved = {name for name, place in places(policy).items() if place != before[name]}
    stays = ("chunk", "master") if precision == "fp32" else ("chunk",)
    assert moved == {name for name in before if not name.startswith(stays)}
    host = places(policy)
    policy.take_memory()
    policy.take_memory()
    assert not {host[name] for name in moved} & {places(policy)[name] for name in moved}
    policy.give_memory()
    assert places(policy) == host  # page-locking takes long: the same host memory serves again


def test_states_made_by_a_checkpoint_while_masters_were_away_come_back_with_them(
    layout: Layout, checkpoint: Callable[..., Path]
) -> None:
    policy = Policy(make_config(checkpoint(), training={"precision": "bf16"}), layout)
    policy.give_memory()
    _ensure_adam_state(policy)
    host = places(policy)
    policy.take_memory()
    moved = {name for name, place in places(policy).items() if place != host[name]}
    assert moved == {name for name in host if not name.startswith("chunk")}
    assert any(name.startswith("exp_avg") for name in moved)


@pytest.mark.parametrize("kind", [DP_RESHARDABLE, FULLY_RESHARDABLE])
def test_a_state_is_saved_while_the_memory_is_given_up(
    layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    policy = trained(layout, checkpoint(), "bf16", gives=True)
    policy.config.run.dir = str(tmp_path / "run")
    policy.give_memory()
    RunState(policy.config, policy)._save(kind)
    policy.take_memory()
    resumed = Policy(policy.config, layout)
    assert RunState(policy.config, resumed).restore()
    assert differing(resumed, policy) == []


def test_a_tensor_that_is_named_twice_is_stored_once() -> None:
    tensor = torch.arange(3.0)
    memory = HostMemory(pinned=False)
    assert memory.store([tensor, tensor]) == tensor.nbytes
    memory.fetch(torch.device("cpu"))
    tensor += 1
    memory.store([tensor])
    memory.drop()
    assert tensor.tolist() == [1, 2, 3]


def test_memory_that_is_not_given_up_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    allocated = iter([5 << 30, (5 << 30) - 2 * Model.BYTES] * 2)
    monkeypatch.setattr(device, "allocated_memory", lambda: next(allocated))
    give_memory([Model(), Model()])  # type: ignore[list-item]
    assert "5.00 GiB were allocated, 2.00 GiB given up, 3.00 GiB are left" in caplog.text
    with pytest.raises(RuntimeError, match=r"5\.00 GiB were allocated, 3\.00 GiB given up, 3\.00 GiB are left"):
        give_memory([Model(), Model(), Model()])  # type: ignore[list-item]


@pytest.mark.parametrize("mode", ["colocated", "managed"])
def test_models_are_built_when_servers_on_their_gpus_sleep(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """What they do until then is shown."""
    events: list[str] = []

    class StopError(Exception):
        pass

    class Started(nullcontext[Any]):
        def wait_ready(self, on_progress: Callable[[float, float, str], None]) -> None:
            on_progress(1, 2, "loading weights")
            events.append("servers sleep")

    def build(*_: object) -> None:
        events.append("models are built")
        raise StopError

    started = Started()
    started.enter_result = started
    monkeypatch.setattr(training, "open_rollouts", lambda *_: started)
    monkeypatch.setattr(training, "Learner", build)
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    with pytest.raises(StopError):
        training.train(make_config(tmp_path, fleet={"mode": mode}), layout)
    assert events == (["servers sleep"] if mode == "colocated" else []) + ["models are built"]
    assert ("start 1/2 loading weights" in capsys.readouterr().out) == (mode == "colocated")


@pytest.mark.parametrize("mode", ["colocated", "managed"])
def test_a_step_ends_with_its_memory_given_up(layout: Layout, checkpoint: Callable[..., Path], mode: str) -> None:
    learner = Learner(make_config(checkpoint(), fleet={"mode": mode}), layout)
    learner.finish_step()
    given = [buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in learner.policy.ddp[0].buffers]
    assert given == [mode == "colocated"] * len(given)


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert device.free_memory() is None
    assert device.allocated_memory() is None
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
