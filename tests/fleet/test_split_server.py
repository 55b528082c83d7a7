"""A server of two tensor-parallel workers: what each is sent, and that none outlives who started the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo_megatron.rollout.server import Server
from dapo_megatron.sync.plan import ServerLayout
from dapo_megatron.sync.server_admin import ServerError
from tests.fleet.conftest import RunningServer
from tests.fleet.server_parent import StartedServer, gone, session, started_by_a_rank
from tests.fleet.test_weight_push import difference, probe
from tests.fleet.tiny import add_noise, load, weights
from tests.pushing import Push, exchanged, plan_of


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServer]:
    log = tmp_path_factory.mktemp("split_server") / "server.log"
    with started_by_a_rank(tiny_model, log, "healthy", tensor=2) as server:
        yield server


async def test_each_worker_gets_its_part(started: StartedServer, tiny_model: Path) -> None:
    """What vLLM reads of a tensor is what the plan sends; a plan that sends another part is caught."""
    model = load(tiny_model)
    process = Server(0, started.parent, "127.0.0.1", started.port, Path())
    split_server = RunningServer(process, "secret", tiny_model)
    plan = plan_of(split_server.model, ServerLayout(2))
    assert {bucket.group.workers for bucket in plan.buckets} == {(0,), (1,), (0, 1)}
    push = Push(plan, [(split_server.url, split_server.token)], timeout=60)
    swapped = Push(exchanged(plan), [(split_server.url, split_server.token)], timeout=60)
    try:
        push.connect()
        for version in (1, 2):
            add_noise(model, 0.1, seed=version)
            assert difference(model, await probe(split_server)) > 1e-2
            push(weights(model), version)
            assert difference(model, await probe(split_server)) < 1e-4
        push.close()
        for version in (3, 4):  # what one worker says of the first must not be taken for an answer to the second
            swapped.connect()
            with pytest.raises(ServerError, match="was loaded with numbers that were not sent to this worker"):
                swapped(weights(model), version)
        swapped.close()
        push.connect()
        push(weights(model), 5)
        assert difference(model, await probe(split_server)) < 1e-4
    finally:
        push.close()
        swapped.close()


def test_all_processes_die_with_the_killed_parent(started: StartedServer) -> None:
    assert len(session(started.leader)) > 2
    started.parent.kill()
    started.parent.wait()
    assert gone(started.leader, 15), session(started.leader)
