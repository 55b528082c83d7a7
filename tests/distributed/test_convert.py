"""Conversions shared by ranks, and models on real ranks from checkpoints that were converted for others."""

from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.checkpoint.compare import verify_folder
from dapo_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from dapo_megatron.checkpoint.distcp import DistReader
from dapo_megatron.checkpoint.journal import Workspace
from dapo_megatron.checkpoint.manifest import read_manifest
from dapo_megatron.checkpoint.reshard import reshard
from dapo_megatron.checkpoint.source import HFSource
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.checkpoint_keys import stored_parameter
from tests.checkpoints import files_of, random_checkpoint
from tests.distributed.convert_worker import stored
from tests.distributed.launch import Launcher

pytestmark = pytest.mark.timeout(300)

SHARD_BYTES = 200_000
BEGUN = 25  # parameters
TP_SP: dict[str, Any] = {"tensor": 2, "sequence": True}
VPP: dict[str, Any] = {"pipeline": 2, "virtual_pipeline": 2}
UNEVEN: dict[str, Any] = {"pipeline": 3, "pipeline_layers": [1, 2, 1]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tied": True},  # 151 rows, padded; the last stage has a copy
    "qwen3_moe": {},
    "deepseek_v3": {},  # layers that are not alike, fp32 buffers
}
# Family, the layout of the real ranks, all of which hold some of the model, and that of the conversion they load.
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "TP4": ("qwen2", {"tensor": 4}, UNEVEN),
    "TP2 PP2": ("qwen2", TP_SP | {"pipeline": 2}, {"tensor": 4}),
    "TP2 uneven PP2": ("qwen2", TP_SP | {"pipeline": 2, "pipeline_layers": [3, 1]}, {}),
    "VPP2 EP2": ("qwen3_moe", VPP | {"expert": 2}, TP_SP | {"expert_tensor": 2}),
    "EP2 ETP2 TP2": ("qwen3_moe", TP_SP | {"expert": 2, "expert_tensor": 2}, VPP | {"expert": 4}),
    "TP2 PP2 EP2": ("deepseek_v3", TP_SP | {"pipeline": 2, "expert": 2}, {"expert": 4, "expert_tensor": 2}),
}
CONVERSIONS: list[tuple[str, list[dict[str, Any]]]] = [
    ("qwen3_moe", [VPP | TP_SP | {"expert": 2, "expert_tensor": 2}, UNEVEN | {"expert": 4}]),
    ("qwen2", [UNEVEN | TP_SP, {"tensor": 4}]),
]


def parallel(layout: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig.model_validate(layout)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: random_checkpoint(folder / family, family, **how) for family, how in FAMILIES.items()}


def conversions(models: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    return [
        {"hf": str(models[family]), "out": str(folder / family), "layouts": layouts, "shard_bytes": SHARD_BYTES}
        for family, layouts in CONVERSIONS
    ]


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes."""
    folder = tmp_path_factory.mktemp("alone")
    for family, (first, second) in CONVERSIONS:
        out = folder / family
        hf_to_megatron(models[family], out / "megatron", parallel(first))
        reshard(out / "megatron", out / "reshard", parallel(second))
        megatron_to_hf(out / "reshard", out / "back", shard_bytes=SHARD_BYTES)
    return folder


@pytest.fixture(scope="module")
def four(
    run_ranks: Launcher, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """What four processes make, and what they found wrong in each layout."""
    folder = tmp_path_factory.mktemp("four")
    cases = []
    for i, (name, (family, layout, other)) in enumerate(LAYOUTS.items()):
        hf_to_megatron(models[family], folder / f"other {i}", parallel(other))
        places = {"hf": str(models[family]), "out": str(folder / f"case {i}"), "other": str(folder / f"other {i}")}
        cases.append({"name": name, "layout": layout, **places})
    job = {"conversions": conversions(models, folder), "layouts": cases}
    return folder, run_ranks(4, "tests.distributed.convert_worker", job, folder)


class StopError(Exception):
    """In place of whatever ends a process."""


def begin(hf: Path, out: Path, layout: dict[str, Any]) -> None:
    """Convert some parameters and stop."""
    add, counted = Workspace.add, iter(range(BEGUN - 1))

    def adding(self: Workspace, entry: Any, num_bytes: int) -> None:
        add(self, entry, num_bytes)
        if next(counted, None) is None:
            self.commit()
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "add", adding)
        with pytest.raises(StopError):
            hf_to_megatron(hf, out, parallel(layout))


@pytest.fixture(scope="module")
def two(run_ranks: Launcher, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes make; the first conversion of one family was begun by a single one."""
    folder = tmp_path_factory.mktemp("two")
    family, (first, _) = CONVERSIONS[0]
    begin(models[family], folder / family / "megatron", first)
    job = {"conversions": conversions(models, folder), "layouts": []}
    run_ranks(2, "tests.distributed.convert_worker", job, folder)
    return folder


@pytest.mark.parametrize("family", [family for family, _ in CONVERSIONS])
def test_processes_make_what_one_makes(family: str, alone: Path, four: tuple[Path, dict[str, Any]], two: Path) -> None:
    """Of Megatron checkpoints each process has files of its own; the Hugging Face folders are equal in every byte."""
    for folder in (two, four[0]):
        for name in ("megatron", "reshard"):
            ours, theirs = folder / family / name, alone / family / name
            assert stored(ours) == stored(theirs)
            assert read_manifest(ours) == read_manifest(theirs)
            assert {path.stem.rpartition("_")[2] for path in ours.glob("*.distcp")} > {"0"}
            verify_folder(ours)
        assert files_of(folder / family / "back") == files_of(alone / family / "back")


def test_two_processes_go_on_where_one_was(models: dict[str, Path], two: Path) -> None:
    """Process 1 has written nothing of what process 0 had when it was alone."""
    family, _ = CONVERSIONS[0]
    source, reader = HFSource(models[family]), DistReader(two / family / "megatron")
    writers = []
    for item in source.items():
        place = stored_parameter(item.row, source.arch)
        own = [c for c in reader.chunks(place.key) if c.offset[: len(place.index)] == place.index]
        writers.append({Path(chunk.file).stem.rpartition("_")[2] for chunk in own})
    assert writers[:BEGUN] == [{"0"}] * BEGUN
    assert writers[BEGUN : BEGUN + 4] == [{"0"}, {"1"}, {"0"}, {"1"}]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_real_ranks(name: str, four: tuple[Path, dict[str, Any]]) -> None:
    for wrong in four[1][name]:
        assert wrong == {what: [] for what in wrong}
