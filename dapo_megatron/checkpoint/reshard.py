"""A Megatron checkpoint in another layout, with its optimizer's state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.checkpoint.convert import Done, manifest_of, num_bytes, write_shards
from dapo_megatron.checkpoint.dist_writer import MegatronWriter
from dapo_megatron.checkpoint.hf import copy_without_weights
from dapo_megatron.checkpoint.journal import Workspace, lock_path
from dapo_megatron.checkpoint.manifest import MANIFEST, read_manifest
from dapo_megatron.checkpoint.megatron import CRITIC, MegatronCheckpoint
from dapo_megatron.checkpoint.source import MegatronSource, verify_state
from dapo_megatron.checkpoint.untrained import base_of, missing_layers
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.run_state.store import RUN, latest_state, publish, read_run, state_path

_RANDOM = "random/"  # random state of each rank of the layout that saved it: of no meaning in another


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint that a user means by a folder: itself, or the newest state of a run's folder.

    Raises:
        UserError: if it is neither.
    """
    if (state := latest_state(folder)) is not None:
        return state
    if not (folder / ".metadata").exists():
        raise UserError(f"--checkpoint: {folder} is neither a Megatron checkpoint nor the folder of a run with a state")
    return folder


def reshard(checkpoint: Path, out: Path, parallel: ParallelConfig, *, weights_only: bool = False) -> Done:
    """Write a Megatron checkpoint again as the shards of another layout.

    Args:
        checkpoint: a converted checkpoint, or a run's saved state; it is not changed.
        out: for a converted checkpoint the new folder. For a run's state the folder of a new run, whose only state is
            the new one: a run with `run.dir=OUT` in the layout continues from there.
        parallel: the layout.
        weights_only: leave the optimizer's state behind; the result is then a checkpoint without a run. Its manifest
            says where an export finds what was not trained.

    Raises:
        UserError: if the optimizer's state fits one layout only, the checkpoint is damaged, `out` exists, or the disk
            is full.
    """
    found = MegatronCheckpoint(checkpoint)
    is_state = (checkpoint / RUN).exists() and not weights_only
    run = read_run(checkpoint, "step") if is_state else {}
    if found.bucketed and not weights_only:
        raise UserError(
            f"--checkpoint: {checkpoint} holds the optimizer's state as it lay in the buffers of its layout "
            f"(dp_reshardable), which fits no other: continue that run once in its own layout with "
            f"run.steps={run.get('step')}, which writes the state again for every layout, or give --weights-only"
        )
    target = state_path(out, run["step"]) if is_state else out
    if is_state:
        _refuse_other_states(out, target)
    source = MegatronSource(found, weights_only=weights_only)
    base = base_of(checkpoint) if missing_layers(source.arch, found.rows) and not is_state else None
    verify_state(checkpoint)
    workspace, writer, entries = write_shards(source, target, parallel)
    copies = read_manifest(checkpoint).copies if (checkpoint / MANIFEST).exists() else {}
    manifest = manifest_of(entries, copies=copies, layout=parallel.layout(0), base=str(base or ""))
    if workspace.rank == 0:
        common = {} if weights_only else found.files.common()
        writer.finish(source, entries, common, _objects(source, writer, weights_only=weights_only))
        copy_without_weights(checkpoint, workspace.folder)
        manifest.write(workspace.folder)
    workspace.barrier()
    if is_state and (checkpoint / CRITIC).is_dir():
        _reshard_critic(found, workspace, parallel)
    if workspace.rank == 0:
        if is_state:
            workspace.finish()
            publish(workspace.folder, target, run | {"layout": parallel.layout(0)}, keep=1)
            workspace.release()
        else:
            workspace.publish()
    workspace.barrier()
    return Done(target, manifest, num_bytes(source, None))


def _refuse_other_states(out: Path, target: Path) -> None:
    """The new state is to be the only one of its run: whoever keeps one state removes the others."""
    ours = (target.parent, target.with_name(target.name + ".incomplete"), lock_path(target))
    if any(path not in ours for path in (*out.glob("*"), *target.parent.glob("*"))):
        raise UserError(f"--out: {out} exists already: remove it, or choose another name")


def _objects(source: MegatronSource, writer: MegatronWriter, *, weights_only: bool) -> list[Any]:
    """What is sharded and no tensor."""
    if weights_only:
        return writer.extra_states(source)
    files = source.checkpoint.files
    payloads: Mapping[str, bytes] = {
        key: files.object_bytes(key) for key in sorted(files.objects) if not key.startswith(_RANDOM)
    }
    return writer.objects(payloads)


def _reshard_critic(policy: MegatronCheckpoint, workspace: Workspace, parallel: ParallelConfig) -> None:
    """The critic's checkpoint, in its folder of the state. One that is there is whole."""
    target = workspace.folder / CRITIC
    if target.exists():
        return
    source = MegatronSource(MegatronCheckpoint(policy.folder / CRITIC, critic_of=policy.arch), weights_only=False)
    inner, writer, entries = write_shards(source, target, parallel)
    if inner.rank == 0:
        writer.finish(source, entries, source.checkpoint.files.common(), _objects(source, writer, weights_only=False))
        manifest_of(entries, layout=parallel.layout(0)).write(inner.folder)
        inner.publish()
    inner.barrier()
