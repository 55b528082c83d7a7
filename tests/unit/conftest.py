"""A world of one rank in the test's own process, and tiny checkpoints made once."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.models import tiny_model

settings.register_profile("untimed", deadline=None)  # cores are shared: a slow example is no failure
settings.load_profile("untimed")

if TYPE_CHECKING:
    from dapo_megatron.rollout.handle import RemoteRollouts
    from dapo_megatron.trainer.parallel import Layout
    from tests.running_service import RunningService


def pytest_collection_finish() -> None:
    """Megatron collects garbage at every save: it need not look through all that was imported each time."""
    gc.freeze()


@pytest.fixture(scope="module")
def layout() -> "Iterator[Layout]":
    """Megatron's process groups for a single rank, without torchrun."""
    import torch.distributed as dist

    from dapo_megatron.config.training import ParallelConfig
    from dapo_megatron.trainer import parallel

    yield parallel.initialize(ParallelConfig.model_validate({}), seed=1, threads=1)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Call it as `tests.models.tiny_model` without a folder; the same arguments give the same folder."""
    made: dict[tuple[str, bool, int], Path] = {}

    def make(family: str = "qwen2", *, tied: bool = True, vocab: int = 151) -> Path:
        key = (family, tied, vocab)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{tied}-{vocab}")
            made[key] = tiny_model(folder, family, tied=tied, vocab=vocab)
        return made[key]

    return make


@pytest.fixture
def running(tmp_path: Path) -> "Iterator[RunningService]":
    """A controller's service, whose configuration is that of `write_config`."""
    from dapo_megatron.config.load import load_config
    from tests.running_service import RunningService
    from tests.unit.config_helpers import write_config, write_model

    write_model(tmp_path / "model")
    running = RunningService(tmp_path / "controller.log", load_config(write_config(tmp_path)))
    yield running
    running.stop()


@pytest.fixture
def rollouts(running: "RunningService") -> "Iterator[RemoteRollouts]":
    """The trainer's handle of `running`."""
    from dapo_megatron.rollout.handle import RemoteRollouts

    with RemoteRollouts(running.address) as rollouts:
        yield rollouts
