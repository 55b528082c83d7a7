"""Pushes through shared memory: every worker gets its part from its own rank, and nobody waits for a lost peer."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.table import hf_shapes
from dapo_megatron.sync.channel import Way
from dapo_megatron.sync.plan import ServerLayout, TransferPlan
from dapo_megatron.sync.pusher import Member, PushReport
from dapo_megatron.sync.same_host import SharedReceiver, SharedSender, _Memory, open_memory
from dapo_megatron.sync.same_host_plan import same_host_plan
from dapo_megatron.sync.same_host_pusher import SameHostPusher, server_number
from dapo_megatron.sync.server_admin import ServerError
from dapo_megatron.sync.wire import Stretch
from tests.fake_fleet import FakeServer, fake_fleet
from tests.models import tiny_model
from tests.pushing import Push, TensorSource, equal, plan_of

Weights = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")


def random_weights(model: Path, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(architecture_of(model))
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


class World:
    """Trainer ranks as threads, each with all of the weights; rank 0 decides for all."""

    def __init__(self, size: int, plan: TransferPlan, timeout: float = 20) -> None:
        self._meet = threading.Barrier(size, timeout=60)
        self._decided: Any = None
        self._pool = ThreadPoolExecutor(size)
        self.sources = [TensorSource() for _ in range(size)]
        self.pushers = [
            SameHostPusher(
                plan, source, rank=rank, agree=self._agree(rank), host="127.0.0.1", timeout=timeout, backend="gloo"
            )
            for rank, source in enumerate(self.sources)
        ]

    def connect(self, members: list[Member]) -> None:
        """On all ranks."""
        list(self._pool.map(lambda pusher: pusher.connect(members), self.pushers))

    def push(self, weights: Weights, version: int) -> list[PushReport | ServerError]:
        """What each rank got."""
        for source in self.sources:
            source.set(weights)

        def run(pusher: SameHostPusher) -> PushReport | ServerError:
            try:
                return pusher.push(version)
            except ServerError as error:
                return error

        return list(self._pool.map(run, self.pushers))

    def close(self) -> None:
        """Leaves everything."""
        for pusher in self.pushers:
            pusher.close()
        self._pool.shutdown()

    def _agree(self, rank: int) -> Callable[[Callable[[], Any]], Any]:
        def agree(function: Callable[[], Any]) -> Any:
            if rank == 0:
                self._decided = function()
            self._meet.wait()
            decided = self._decided
            self._meet.wait()
            return decided

        return agree


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    opened: list[World] = []

    def open_world(*arguments: Any, **options: Any) -> World:
        opened.append(World(*arguments, **options))
        return opened[-1]

    yield open_world
    for one in opened:
        one.close()


def members_of(servers: list[FakeServer]) -> list[Member]:
    return [Member(f"server_{number}", server.url, "token") for number, server in enumerate(servers)]


def check_received(server: FakeServer, weights: Weights) -> None:
    """The workers of a server together have every byte, each exactly the part that it holds."""
    for name, tensor in weights:
        parts = [(s, view) for worker in server.received for s, view in worker if s.name == name]
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for stretch, view in parts:
            place = (stretch.dim, stretch.start, stretch.stop - stretch.start)
            assert equal(view, tensor.narrow(*place)), str(stretch)
            covered.narrow(*place).fill_(True)
        assert covered.all(), name


@pytest.mark.parametrize("layout", [ServerLayout(2), ServerLayout(1, 2)])
def test_every_worker_is_fed_by_its_own_rank(model: Path, world: Callable[..., World], layout: ServerLayout) -> None:
    with fake_fleet(2, 2) as servers:
        four = world(4, plan_of(model, layout))
        four.connect(members_of(servers))
        for version in (1, 2):
            weights = random_weights(model, version)
            reports = four.push(weights, version)
            assert all(isinstance(report, PushReport) for report in reports), reports
            for server in servers:
                check_received(server, weights)
                assert server.versions[-1] == version
        assert isinstance(reports[0], PushReport)
        sent = reports[0].bytes
        assert sorted(sent) == [0, 1, 2, 3]
        whole = sum(tensor.nbytes for _, tensor in weights)
        assert whole <= sent[0] + sent[1] < 1.2 * whole
        assert (sent[0], sent[1]) == (sent[2], sent[3])


def test_the_rest_is_fed_when_a_server_is_left_out(model: Path, world: Callable[..., World]) -> None:
    """Ranks that feed nobody gather with the others, rank 0 conducts."""
    with fake_fleet(2, 1) as servers:
        two = world(2, plan_of(model))
        two.connect(members_of(servers)[1:])
        weights = random_weights(model, 3)
        reports = two.push(weights, 3)
        assert all(isinstance(report, PushReport) and list(report.bytes) == [1] for report in reports), reports
        check_received(servers[1], weights)
        assert servers[0].versions == []


def test_a_worker_that_fails_is_named_to_every_rank(model: Path, world: Callable[..., World]) -> None:
    def fail(worker: int) -> None:
        raise ValueError("no more memory")

    with fake_fleet(2, 1) as servers:
        servers[1].fault = fail
        two = world(2, plan_of(model), timeout=8)
        two.connect(members_of(servers))
        failures = two.push(random_weights(model, 3), 3)
        assert [type(failure) for failure in failures] == [ServerError] * 2
        assert all(failure.url == servers[1].url for failure in failures if isinstance(failure, ServerError))
        servers[1].fault = lambda worker: None
        two.connect(members_of(servers))
        weights = random_weights(model, 4)
        assert all(isinstance(report, PushReport) for report in two.push(weights, 4))
        check_received(servers[1], weights)


@pytest.mark.parametrize("way", ["broadcast", "delta"])
def test_other_ways_bring_the_same(model: Path, way: Way) -> None:
    with fake_fleet(2, 1) as servers:
        push = Push(plan_of(model), [(server.url, "token") for server in servers], way=way)
        push.connect()
        weights = random_weights(model, 1)
        for version in (1, 2, 3):
            weights[version][1].view(-1)[3] = 7.5
            push(weights, version)
            for server in servers:
                check_received(server, weights)
        push.close()


def test_plan_gives_each_worker_what_it_needs(model: Path) -> None:
    whole = plan_of(model, ServerLayout(2, 2))
    plan = same_host_plan(whole, [0, 2])
    assert plan.senders == (0, 1, 2, 3, 8, 9, 10, 11)
    rows = [row for turn in whole.turns for row in turn.rows]

    def stretches(buckets: Any) -> list[Stretch]:
        return sorted(s for bucket in buckets for s in bucket.stretches)

    for position, first in enumerate((0, 8)):
        own = plan.of_server(position)
        for worker in range(4):
            assert stretches(own.received(worker)) == stretches(whole.received(worker))
            assert {bucket.group.sender for bucket in own.received(worker)} == {first + worker}
    for rank in range(12):  # also ranks 4 to 7, whose server is left out
        assert [row for turn in plan.turns for row in plan.shared_rows(rank, turn)] == rows
    assert server_number(Member("server_12", "", "")) == 12


def test_memory_is_the_same_in_another_process() -> None:
    memory = _Memory(64, "gloo")
    memory.buffer.fill_(5)
    script = (
        "import json, sys; from dapo_megatron.sync.same_host import open_memory\n"
        "b = open_memory(json.loads(sys.argv[1]), 'gloo'); assert b.tolist() == [5] * 64; b[3] = 9"
    )
    subprocess.run([sys.executable, "-c", script, json.dumps(memory.handle)], check=True, timeout=120)
    assert memory.buffer[:5].tolist() == [5, 5, 5, 9, 5]
    assert open_memory(memory.handle, "gloo").sum() == 5 * 63 + 9


def ends() -> tuple[SharedSender, SharedReceiver]:
    store = HashStore()
    return SharedSender(store, 32, "gloo"), SharedReceiver(store, "gloo", 5)


def test_a_bucket_waits_until_the_last_was_taken() -> None:
    sender, receiver = ends()
    first, second = torch.full((32,), 1, dtype=torch.uint8), torch.full((20,), 2, dtype=torch.uint8)
    assert sender.start_broadcast(first, 5) == 32
    assert not sender.done()
    arrived = [torch.zeros_like(first), torch.zeros_like(second)]
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(sender.start_broadcast, second, 5)
        for buffer in arrived:
            receiver.start_broadcast(buffer, 5)
            assert not receiver.done()
            receiver.wait()
            assert receiver.done()
        begun.result()
    sender.wait()
    assert sender.done()
    assert torch.equal(arrived[0], first)
    assert torch.equal(arrived[1], second)


def test_a_peer_that_is_gone_or_late_is_not_waited_for() -> None:
    buffer = torch.zeros(32, dtype=torch.uint8)
    sender, receiver = ends()
    sender.start_broadcast(buffer, 0.05)
    with pytest.raises(RuntimeError, match="the worker took too long"):
        sender.wait()
    sender, receiver = ends()
    receiver.start_broadcast(buffer, 0.05)
    with pytest.raises(RuntimeError, match="the sender took too long"):
        receiver.wait()
    sender, receiver = ends()
    sender.start_broadcast(buffer, 60)
    receiver.close()
    assert sender.done()
    with pytest.raises(RuntimeError, match="the worker left the channel"):
        sender.wait()
    sender, receiver = ends()
    receiver.start_broadcast(buffer, 60)
    sender.close()
    sender.close()
    with pytest.raises(RuntimeError, match="the sender left the channel"):
        receiver.wait()
    with pytest.raises(RuntimeError, match="closed"):
        sender.start_broadcast(buffer, 60)
