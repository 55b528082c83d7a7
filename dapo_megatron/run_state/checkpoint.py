"""Saving and restoring a run: models, optimizers, schedules, random state, data cursor, weight version.

A state is a Megatron checkpoint folder as a conversion writes it: it can also be exported, or be another run's
`model.path`. A critic has a distributed checkpoint of its own, in the folder `critic` of the state.
"""

import json
import random
import shutil
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from dapo_megatron.checkpoint.hf import files_without_weights
from dapo_megatron.checkpoint.megatron import CRITIC
from dapo_megatron.checkpoint.raw import disk_errors
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.run_state.gathered import keep_places
from dapo_megatron.run_state.store import (
    DP_RESHARDABLE,
    FULLY_RESHARDABLE,
    differing,
    latest_state,
    publish,
    read_run,
    same_layout,
    state_path,
    verify,
)
from dapo_megatron.run_state.writer import write_in_process
from dapo_megatron.trainer.build import ModelChunk
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import on_rank_zero
from dapo_megatron.trainer.trained import TrainedModel

write_in_process()
keep_places()

_NO_PARAMETER: Any = "no parameter"  # the key of a step count in torch's Adam, which leaves keys it does not know alone


class RunState:
    """Saves every `run.save_every` steps and at the end; continues from the newest state.

    `step` is the number of steps done, `version` that of the weights in the servers, `cursor` the sampler's state.
    """

    def __init__(self, config: Config, policy: Policy, critic: Critic | None = None) -> None:
        self.config, self.policy, self.critic = config, policy, critic
        self.step, self.version = 0, 0
        self.cursor: dict[str, Any] = {}
        self._saved: tuple[int, str] | None = None  # step and kind of the newest state
        # Read once: states can still be saved when somebody has removed `model.path`.
        files = files_without_weights(config.model.path) if policy.layout.rank == 0 else []
        self._model_files = {file.name: file.read_bytes() for file in files}

    def restore(self) -> bool:
        """Continue from the newest saved state, if there is one. A collective.

        Every weight, master weight and moment, the schedules, the cursor and the version go on as they were. Random
        states, of which each rank has its own, do so in the layout of the state alone: nothing that is computed draws
        random numbers, as there is no dropout. A critic in the state of which this run has no use is left there.

        Raises:
            UserError: if the state is damaged, was saved in another precision or for another model, lacks the critic
                that this run has, or was saved in another layout and not for all.
        """
        state = latest_state(self.config.run.dir)
        if state is None:
            return False
        run = read_run(state, "step", "version", "cursor", "layout", "precision", "model")
        same = same_layout(state, run, self._layout())
        self._check_identity(state, run)
        on_rank_zero(lambda: verify(state))
        random_state = _sharded_random_state(self.policy.layout) if same else {}
        loaded = dist_checkpointing.load(
            _sharded(self.policy, run["optimizer"], loading=True) | random_state, str(state)
        )
        _set_state(self.policy, loaded)
        if self.critic is not None:
            sharded = _sharded(self.critic, run["optimizer"], loading=True)
            _set_state(self.critic, dist_checkpointing.load(sharded, str(state / CRITIC)))
        if same:
            _set_random_state(loaded["random"])
        self.step, self.version, self.cursor = run["step"], run["version"], run["cursor"]
        self._saved = (self.step, run["optimizer"])
        return True

    def finish_step(self, cursor: dict[str, Any], version: int) -> None:
        """Count a step as done and save where it is due. A collective."""
        self.step, self.version, self.cursor = self.step + 1, version, cursor
        run = self.config.run
        if run.save_every and self.step % run.save_every == 0:
            for_all_layouts = run.reshardable == "always" or self.step == run.steps
            self._save(FULLY_RESHARDABLE if for_all_layouts else DP_RESHARDABLE)

    def save(self) -> None:
        """Write the last state of the run, from which every layout can continue, unless it is there already.

        A collective.
        """
        self._save(FULLY_RESHARDABLE)

    def _save(self, kind: str) -> None:
        if self._saved == (self.step, kind):
            return
        state = state_path(self.config.run.dir, self.step)
        incomplete = state.with_name(state.name + ".incomplete")
        on_rank_zero(lambda: self._prepare(incomplete))
        random_state = _sharded_random_state(self.policy.layout)
        dist_checkpointing.save(_sharded(self.policy, kind, loading=False) | random_state, str(incomplete))
        if self.critic is not None:
            dist_checkpointing.save(_sharded(self.critic, kind, loading=False), str(incomplete / CRITIC))
        dist.barrier()
        on_rank_zero(lambda: self._publish(incomplete, state, kind))
        self._saved = (self.step, kind)

    def _prepare(self, incomplete: Path) -> None:
        """An empty folder. What earlier saves left unfinished goes."""
        for leftover in (*incomplete.parent.glob("*.incomplete"), *incomplete.parent.glob("*.old")):
            shutil.rmtree(leftover, ignore_errors=True)
        (incomplete / CRITIC if self.critic is not None else incomplete).mkdir(parents=True)

    def _publish(self, incomplete: Path, state: Path, kind: str) -> None:
        for name, content in self._model_files.items():
            with disk_errors(incomplete / name):
                (incomplete / name).write_bytes(content)
        publish(incomplete, state, self._run(kind), self.config.run.keep)

    def _run(self, kind: str) -> dict[str, Any]:
        """What `read_run` is to return: how to go on, and where an export finds tensors that are not trained."""
        return {
            "step": self.step,
            "version": self.version,
            "cursor": self.cursor,
            "layout": self._layout(),
            "optimizer": kind,
            "model_path": str(Path(self.config.model.path).resolve()),
            **self._identity(),
        }

    def _layout(self) -> dict[str, Any]:
        return self.config.parallel.layout(self.policy.layout.world_size)

    def _identity(self) -> dict[str, dict[str, Any]]:
        """What a state and the run that continues from it must have in common, in whatever layout."""
        return {
            "precision": {"training.precision": self.config.training.precision},
            "model": _as_json(self.policy.arch),
            **({CRITIC: _as_json(self.critic.arch)} if self.critic is not None else {}),
        }

    def _check_identity(self, state: Path, run: dict[str, Any]) -> None:
        identity = self._identity()
        if CRITIC in identity and CRITIC not in run:
            raise UserError(
                f"run.resume: {state} holds no critic, which algorithm.advantage.estimator="
                f"{self.config.algorithm.advantage.estimator} needs: use the estimator it was saved with, or another "
                "run.dir"
            )
        for key, ours in identity.items():
            saved = run[key] if key == "precision" else _DEFAULTS | run[key]
            if saved != ours:
                raise UserError(
                    f"run.resume: {state} was saved with the {key} {differing(saved, ours)}, this run has "
                    f"{differing(ours, saved)}"
                )


def _as_json(arch: Architecture) -> dict[str, Any]:
    """An architecture as `run.json` holds it."""
    fields_of_it: dict[str, Any] = json.loads(json.dumps(asdict(arch)))
    return fields_of_it


# Of fields that architectures got after a state was saved.
_DEFAULTS = {field.name: field.default for field in fields(Architecture) if field.default is not MISSING}


def load_latest(config: Config, policy: Policy, critic: Critic | None = None) -> RunState:
    """The run's state: restored where `run.resume` says so and something was saved, fresh otherwise.

    Raises:
        UserError: if `run.resume` is `never` and the folder holds a state.
    """
    state = RunState(config, policy, critic)
    if config.run.resume == "never":
        found = latest_state(config.run.dir)
        if found is not None:
            raise UserError(f"run.resume=never, but {found} holds a saved state: choose another run.dir or remove it")
    else:
        state.restore()
    return state


def _sharded(model: TrainedModel, kind: str, *, loading: bool) -> dict[str, Any]:
    """Everything of a model that updates change, as megatron's checkpoints describe it.

    The `kind` DP_RESHARDABLE holds Adam's states as they lie in the buffers, which needs no gathering.
    FULLY_RESHARDABLE gathers them on the first data-parallel rank, in host memory; without data parallelism they are
    saved where they are.
    """
    _ensure_adam_state(model)
    metadata = {
        "distrib_optim_sharding_type": kind,
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,  # dense and expert parameters alike under the names of the model
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _chunk_keys(model).items()}
    whole = chunks if len(chunks) > 1 else chunks["model"]
    return {
        **chunks,
        "optimizer": model.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=metadata),
        "scheduler": model.scheduler.state_dict(),
    }


def _set_state(model: TrainedModel, loaded: dict[str, Any]) -> None:
    for key, chunk in _chunk_keys(model).items():
        chunk.load_state_dict(loaded[key])
    model.optimizer.load_state_dict(loaded["optimizer"])
    model.scheduler.load_state_dict(loaded["scheduler"])


def _chunk_keys(model: TrainedModel) -> dict[str, ModelChunk]:
    """A rank's model chunks under the keys that megatron's optimizer looks for."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(model.chunks)}


def _ensure_adam_state(model: TrainedModel) -> None:
    """Create zero moments where no step was taken yet: a state without them can be neither saved nor loaded.

    An optimizer may have no parameters on this rank, as that of the experts on a stage of dense layers. It still must
    have a count of steps: all of a model have taken the same number.
    """
    optimizers = inner_optimizers(model.optimizer)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
    held = [optimizer for optimizer in optimizers if any(group["params"] for group in optimizer.param_groups)]
    counts = [state["step"] for optimizer in held for state in optimizer.state.values() if "step" in state]
    for optimizer in optimizers:
        if optimizer not in held:
            optimizer.state[_NO_PARAMETER] = {"step": counts[0].clone() if counts else torch.tensor(0.0)}


def _sharded_random_state(layout: Layout) -> dict[str, Any]:
    """Each rank's own."""
    return {"random": ShardedObject("random", _random_state(), (layout.world_size,), (layout.rank,), replica_id=0)}


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tensor_parallel": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tensor_parallel"])
