"""`dapo-megatron verify layout` from the command line to its verdict."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.models import REPOSITORY, tiny_model


def verify(model: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and what was printed. Nothing is left behind after the timeout."""
    command = [sys.executable, "-m", "dapo_megatron.cli", "verify", "layout", "--model", str(model), *arguments]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=110)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    return process.returncode, output


def test_a_layout_of_two_ranks_passes(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen2")
    code, output = verify(
        model, "--tp", "2", "--sp", "--recompute", "full", "--loss", "gspo", "--aggregation", "sequence_mean"
    )
    assert code == 0, output
    assert "TP2 SP" in output
    assert "gradients, worst of 50" in output
    assert "pass: no difference is above 1e-05" in output
