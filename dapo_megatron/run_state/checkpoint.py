"""Saving and restoring a run: model, optimizer, schedule, random state, data cursor, weight version."""

import random
import shutil
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.run_state.store import latest_state, publish, read_run, state_path, verify
from dapo_megatron.run_state.writer import write_in_process
from dapo_megatron.trainer.build import PolicyModel
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import on_rank_zero

write_in_process()

# Adam states as they lie in the buffers: no gathering at a save. Loads at the same tensor and pipeline size.
_SHARDING = "dp_reshardable"


class RunState:
    """Saves every `run.save_every` steps and at the end; continues from the newest state.

    `step` is the number of steps done, `version` that of the weights in the servers, `cursor` the sampler's state.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.step, self.version = 0, 0
        self.cursor: dict[str, Any] = {}
        self._saved_step = 0

    def restore(self) -> bool:
        """Continue from the newest saved state, if there is one. A collective.

        Raises:
            UserError: if the state is damaged, or was saved in another layout or precision or for another model.
        """
        state = latest_state(self.config.run.dir)
        if state is None:
            return False
        run = read_run(state)
        for key, ours in _identity(self.policy).items():
            if run[key] != ours:
                saved, here = _differing(run[key], ours), _differing(ours, run[key])
                raise UserError(f"run.resume: {state} was saved with the {key} {saved}, this run has {here}")
        on_rank_zero(lambda: verify(state))
        loaded = dist_checkpointing.load(self._sharded(loading=True), str(state))
        for key, chunk in _chunk_keys(self.policy).items():
            chunk.load_state_dict(loaded[key])
        self.policy.optimizer.load_state_dict(loaded["optimizer"])
        self.policy.scheduler.load_state_dict(loaded["scheduler"])
        _set_random_state(loaded["random"])
        self.step, self.version, self.cursor = run["step"], run["version"], run["cursor"]
        self._saved_step = self.step
        return True

    def finish_step(self, cursor: dict[str, Any], version: int) -> None:
        """Count a step as done and save where it is due. A collective."""
        self.step, self.version, self.cursor = self.step + 1, version, cursor
        every = self.config.run.save_every
        if every and self.step % every == 0:
            self.save()

    def save(self) -> None:
        """Write the state now, unless this step's is there already. A collective."""
        if self._saved_step == self.step:
            return
        state = state_path(self.config.run.dir, self.step)
        incomplete = state.with_name(state.name + ".incomplete")
        if self.policy.layout.rank == 0:
            for leftover in state.parent.glob("*.incomplete"):
                shutil.rmtree(leftover, ignore_errors=True)
            incomplete.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self._sharded(loading=False), str(incomplete))
        dist.barrier()
        if self.policy.layout.rank == 0:
            run = {
                "step": self.step,
                "version": self.version,
                "cursor": self.cursor,
                **_identity(self.policy),
            }
            publish(incomplete, state, run, self.config.run.keep)
        dist.barrier()
        self._saved_step = self.step

    def _sharded(self, loading: bool) -> dict[str, Any]:
        policy = self.policy
        _ensure_adam_state(policy)
        metadata = {
            "distrib_optim_sharding_type": _SHARDING,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _chunk_keys(policy).items()}
        whole = model if len(model) > 1 else model["model"]
        return {
            **model,
            "optimizer": policy.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=metadata),
            "scheduler": policy.scheduler.state_dict(),
            "random": ShardedObject(
                "random", _random_state(), (policy.layout.world_size,), (policy.layout.rank,), replica_id=0
            ),
        }


def load_latest(config: Config, policy: Policy) -> RunState:
    """The run's state: restored where `run.resume` says so and something was saved, fresh otherwise.

    Raises:
        UserError: if `run.resume` is `never` and the folder holds a state.
    """
    state = RunState(config, policy)
    if config.run.resume == "never":
        found = latest_state(config.run.dir)
        if found is not None:
            raise UserError(f"run.resume=never, but {found} holds a saved state: choose another run.dir or remove it")
    else:
        state.restore()
    return state


def _chunk_keys(policy: Policy) -> dict[str, PolicyModel]:
    """A rank's model chunks under the keys that megatron's optimizer looks for."""
    if len(policy.chunks) == 1:
        return {"model": policy.chunks[0]}
    return {f"model{i}": chunk for i, chunk in enumerate(policy.chunks)}


def _identity(policy: Policy) -> dict[str, dict[str, Any]]:
    """What a state and the run that continues from it must have in common."""
    return {
        "layout": policy.config.parallel.layout(policy.layout.world_size),
        "precision": {"training.precision": policy.config.training.precision},
        "model": asdict(policy.arch),
    }


def _differing(values: dict[str, Any], others: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items() if value != others.get(key))


def _ensure_adam_state(policy: Policy) -> None:
    """Create zero moments where no step was taken yet: a state without them can be neither saved nor loaded."""
    for optimizer in inner_optimizers(policy.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


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
