"""launch/rollout_fleet.sh and `dapo-megatron serve`: a server that only the token opens, and that leaves nothing."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import yaml

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.rollout.client import ServerClient
from dapo_megatron.rollout.requests import Sampling
from dapo_megatron.rollout.server import free_port
from tests.fleet.conftest import START_SECONDS
from tests.fleet.test_run import sections
from tests.models import REPOSITORY
from tests.processes import descendants, gone_within

ELSEWHERE = "http://10.0.0.9:8000"  # a server that another node has written down


async def test_servers_of_a_node(tiny_model: Path, task: Path, tiny_fleet: FleetConfig, tmp_path: Path) -> None:
    config, urls_file, token_file = (tmp_path / name for name in ("config.yaml", "servers.txt", "token"))
    config.write_text(yaml.safe_dump(sections(tiny_model, task, tiny_fleet, tmp_path / "run")))
    urls_file.write_text(f"{ELSEWHERE}\n")
    port = free_port("127.0.0.1")
    variables = {"TOKEN_FILE": str(token_file), "URLS_FILE": str(urls_file), "PORT": str(port), "FIRST_INDEX": "3"}
    process = subprocess.Popen(
        [str(REPOSITORY / "launch" / "rollout_fleet.sh"), str(config)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    everyone = [process.pid]
    try:
        deadline = time.monotonic() + START_SECONDS
        while len(lines := urls_file.read_text().splitlines()) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        everyone += descendants(process.pid)
        assert lines == [ELSEWHERE, f"http://127.0.0.1:{port}"]
        assert (tmp_path / "run" / "logs" / "server_3.log").is_file()
        assert token_file.stat().st_mode & 0o077 == 0
        token = token_file.read_text().strip()
        assert token not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in everyone)
        assert httpx.get(f"{lines[1]}/get_world_size").status_code == 401
        async with ServerClient(lines[1], token, timeout=60) as client:
            answer = await client.generate([1, 2, 3], Sampling(4, 1.0, ignore_eos=True), "probe")
        assert len(answer.token_ids) == 4
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert all(gone_within(pid, 15) for pid in everyone)
        assert urls_file.read_text() == f"{ELSEWHERE}\n"
    finally:
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
