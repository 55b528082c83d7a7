"""launch/rollout_fleet.sh and an external fleet: servers that only a token opens, and that come and go during a run."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.records import read_records
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.server import free_port
from tests.chaos.audit import audit, lost_seconds
from tests.chaos.watching import Watcher, states, write_config
from tests.fleet.conftest import START_SECONDS, RunningServer
from tests.fleet.test_run import RUN_SECONDS, started
from tests.models import REPOSITORY
from tests.processes import descendants, gone_within

STEPS = 4


@contextmanager
def node(config: Path, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """A node's servers; nothing of them is left afterwards."""
    process = subprocess.Popen(
        [str(REPOSITORY / "launch" / "rollout_fleet.sh"), str(config)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [*(descendants(process.pid) if process.poll() is None else ()), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(2 * START_SECONDS + RUN_SECONDS)  # two servers and a run
async def test_servers_of_a_node_leave_during_a_run(
    running: RunningServer, task: Path, tiny_fleet: FleetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared server is written down in the file by another node. It hangs for a while in the third step."""
    urls_file, token_file = tmp_path / "servers.txt", tmp_path / "token"
    urls_file.write_text(f"{running.url}\n")
    token_file.touch(mode=0o600)
    token_file.write_text(running.token)
    monkeypatch.setenv(tiny_fleet.token_env, running.token)
    external = {"mode": "external", "urls_file": str(urls_file), "health_every": 0.5, "stall_timeout": 4}
    fleet = FleetConfig(**tiny_fleet.model_dump() | external | {"stream_interval": 4, "push_timeout": 60})
    config, run = write_config(running.model, task, tmp_path, fleet, STEPS), tmp_path / "run"
    port = free_port("127.0.0.1")
    variables = {"TOKEN_FILE": str(token_file), "URLS_FILE": str(urls_file), "PORT": str(port), "FIRST_INDEX": "3"}
    with node(config, **variables) as servers:
        url = await joined(servers, urls_file, port)
        everyone = [servers.pid, *descendants(servers.pid)]
        assert (run / "logs" / "server_3.log").is_file()
        assert running.token not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in everyone)
        assert httpx.get(f"{url}/get_world_size").status_code == 401
        async with ServerClient(url, running.token, timeout=60) as client:
            answer = await client.generate([1, 2, 3], Sampling(4, 1.0, ignore_eos=True), "probe")
        assert len(answer.token_ids) == 4
        with started(config) as process:
            watcher = Watcher(run, process, RUN_SECONDS)
            watcher.in_step(2)
            servers.send_signal(signal.SIGTERM)
            assert servers.wait(60) == 0
            assert all(gone_within(pid, 15) for pid in everyone)
            assert urls_file.read_text() == f"{running.url}\n"
            shared = running.url.removeprefix("http://")
            watcher.in_step(3)
            os.killpg(running.server.process.pid, signal.SIGSTOP)
            try:
                watcher.wait(lambda records: "removed" in states(records, shared), "removal")
            finally:
                os.killpg(running.server.process.pid, signal.SIGCONT)
            output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, output[-4000:]
    assert audit(run / "rollouts") == []
    records = list(read_records(run / "rollouts"))
    assert states(records, f"127.0.0.1:{port}")[-1] == "removed"
    assert states(records, shared)[-1] == "ready"
    assert [record["version"] for record in records if record["kind"] == "push"][-1] == STEPS
    assert lost_seconds(run / "rollouts")["all"] > 0


async def joined(servers: "subprocess.Popen[str]", urls_file: Path, port: int) -> str:
    """Wait until the servers have written themselves down; the URL."""
    deadline = time.monotonic() + START_SECONDS
    while len(lines := urls_file.read_text().splitlines()) < 2:
        assert servers.poll() is None, servers.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert lines[1] == f"http://127.0.0.1:{port}"
    return lines[1]
