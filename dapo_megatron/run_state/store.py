"""Where saved states lie on disk. No torch: the command line asks it before any process starts.

run_dir/state/latest                 name of the newest complete state, one line
run_dir/state/step_000010/           one state: Megatron's distributed checkpoint, the model's Hugging Face files
                                     without weights, run.json, manifest.json
run_dir/state/*.incomplete           a save that did not finish; ignored and removed by the next one
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo_megatron.errors import UserError
from dapo_megatron.files import fsync, replace_folder, write_atomically

MANIFEST = "manifest.json"
RUN = "run.json"

# How a state holds the optimizer's: as it lies in the buffers of one layout, or by parameter, for all layouts.
DP_RESHARDABLE, FULLY_RESHARDABLE = "dp_reshardable", "fully_reshardable"
_CHUNK = 1 << 22


def state_dir(run_dir: str | Path) -> Path:
    """The folder of all saved states of a run."""
    return Path(run_dir) / "state"


def state_path(run_dir: str | Path, step: int) -> Path:
    """The folder of the state after `step` steps."""
    return state_dir(run_dir) / f"step_{step:06d}"


def latest_state(run_dir: str | Path) -> Path | None:
    """The newest complete state, or None where nothing was saved.

    Raises:
        UserError: if `latest` names a state that is not there.
    """
    pointer = state_dir(run_dir) / "latest"
    if not pointer.exists():
        return None
    state = state_dir(run_dir) / pointer.read_text().strip()
    if not (state / MANIFEST).exists():
        raise UserError(
            f"{pointer} names {state.name}, which is missing or incomplete; write another state's name in it"
        )
    return state


def read_run(state: Path, *needed: str) -> dict[str, Any]:
    """The run's own part of a state: step, weight version, cursor, layout, model, kind of the optimizer's state.

    Args:
        state: its folder.
        needed: keys that it must have.

    Raises:
        UserError: if it cannot be read or lacks a key.
    """
    run = {"optimizer": DP_RESHARDABLE} | _read_json(state, RUN)  # older ones were all of that kind
    for key in needed:
        if key not in run:
            raise UserError(f"saved state {state} is damaged: {RUN} has no {key!r}")
    return run


def same_layout(state: Path, run: dict[str, Any], layout: dict[str, Any]) -> bool:
    """Whether a state was saved in the layout (`ParallelConfig.layout`) in which it is to be continued from.

    Args:
        state: its folder.
        run: what `read_run` gave, with `layout` and `step`.
        layout: the other one.

    Raises:
        UserError: if it was not, and its optimizer's state fits no other layout.
    """
    saved = {"pipeline_layers": None} | run["layout"]  # stages were all alike before they could differ
    if saved == layout:
        return True
    if run["optimizer"] != FULLY_RESHARDABLE:
        raise UserError(
            f"run.resume: {state} was saved with the layout {differing(saved, layout)}, this run has "
            f"{differing(layout, saved)}, and the optimizer's state in it fits the former alone: resume it there once "
            f"with run.steps={run['step']}, which writes it again for every layout"
        )
    return False


def differing(values: dict[str, Any], others: dict[str, Any]) -> str:
    """The values that are not those of `others`, for messages: "tensor=2, data=1"."""
    return ", ".join(f"{key}={value}" for key, value in values.items() if value != others.get(key))


def verify(state: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        UserError: naming the first file that is missing, differs or cannot be read.
    """
    manifest = _read_json(state, MANIFEST)
    for name, expected in manifest.items():
        path = state / name
        if not path.exists():
            raise UserError(f"saved state {state} is damaged: {name} is missing")
        if path.stat().st_size != expected["bytes"] or _sha256(path) != expected["sha256"]:
            raise UserError(f"saved state {state} is damaged: {name} differs from its checksum")


def publish(incomplete: Path, state: Path, run: dict[str, Any], keep: int) -> None:
    """Make a fully written folder the newest state: manifest, fsync, rename, `latest`, then older ones go.

    Args:
        incomplete: the folder, without `run.json` and manifest.
        state: where it goes; a state that is there is replaced.
        run: what `read_run` is to return.
        keep: how many states may stay, this one included. Those of later steps (the run went on from an older
            state than its last) are not counted and not touched.
    """
    (incomplete / RUN).write_text(json.dumps(run, indent=1) + "\n")
    manifest = {
        str(path.relative_to(incomplete)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(_files(incomplete))
    }
    (incomplete / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for path in [*_files(incomplete), incomplete]:
        fsync(path)
    replace_folder(state, incomplete)
    write_atomically(state.parent / "latest", (state.name + "\n").encode())
    up_to_now = sorted(path for path in state.parent.glob("step_??????") if path.name <= state.name)
    for old in up_to_now[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _read_json(state: Path, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((state / name).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"saved state {state} is damaged: {name} cannot be read: {error}") from None
    return content


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
