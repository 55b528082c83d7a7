"""Laws that are about the source itself."""

import re
import subprocess
import sys

from tests.models import REPOSITORY

PACKAGE = REPOSITORY / "dapo_megatron"

# A question that code asks to find out whether it runs on a CPU.
CPU_BRANCH = re.compile(
    r"is_available\(|is_cpu\b|on_cpu\b|device\.type\b|is_cuda\b|device_count\(|[!=]=\s*[\"'](?:cpu|cuda)[\"']"
)
KNOW_CPU = {"trainer/device.py", "rollout/server.py", "sync/receiver.py"}


def test_cpu_is_known_to_three_files() -> None:
    """Law 9: what CPU tests prove is the code that runs on GPU."""
    asking = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if CPU_BRANCH.search(path.read_text())}
    assert asking <= KNOW_CPU
    assert "rollout/server.py" in asking  # the pattern still finds what it looks for


def imported(module: str) -> set[str]:
    """Top-level packages that importing `module` loads."""
    script = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=60
    ).stdout
    return set(output.split())


def test_trainer_side_of_a_push_does_not_import_vllm() -> None:
    """On a cluster vLLM's pin of torch would replace the one that the trainer was built for."""
    packages = imported("dapo_megatron.sync.pusher")
    assert "torch" in packages
    assert "vllm" not in packages


def test_controller_side_imports_no_torch() -> None:
    packages = imported("dapo_megatron.rollout.server") | imported("dapo_megatron.rollout.client")
    assert not packages & {"torch", "vllm", "transformers"}
