"""Saving and restoring a run: models, optimizers, schedules, random state, data cursor, weight version.

A critic has a distributed checkpoint of its own, in the folder `critic` of the state.
"""

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
from dapo_megatron.trainer.build import ModelChunk
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import on_rank_zero
from dapo_megatron.trainer.trained import TrainedModel

write_in_process()

# Adam states as they lie in the buffers: no gathering at a save. Loads at the same tensor and pipeline size.
_SHARDING = "dp_reshardable"
_CRITIC = "critic"  # its folder in a state


class RunState:
    """Saves every `run.save_every` steps and at the end; continues from the newest state.

    `step` is the number of steps done, `version` that of the weights in the servers, `cursor` the sampler's state.
    """

    def __init__(self, config: Config, policy: Policy, critic: Critic | None = None) -> None:
        self.config, self.policy, self.critic = config, policy, critic
        self.step, self.version = 0, 0
        self.cursor: dict[str, Any] = {}
        self._saved_step = 0

    def restore(self) -> bool:
        """Continue from the newest saved state, if there is one. A collective.

        A critic in the state of which this run has no use is left there.

        Raises:
            UserError: if the state is damaged, was saved in another layout or precision or for another model, or
                lacks the critic that this run has.
        """
        state = latest_state(self.config.run.dir)
        if state is None:
            return False
        run = read_run(state)
        identity = self._identity()
        if _CRITIC in identity and _CRITIC not in run:
            raise UserError(
                f"run.resume: {state} holds no critic, which algorithm.advantage.estimator="
                f"{self.config.algorithm.advantage.estimator} needs: use the estimator it was saved with, or another "
                "run.dir"
            )
        for key, ours in identity.items():
            if run[key] != ours:
                saved, here = _differing(run[key], ours), _differing(ours, run[key])
                raise UserError(f"run.resume: {state} was saved with the {key} {saved}, this run has {here}")
        on_rank_zero(lambda: verify(state))
        random_state = _sharded_random_state(self.policy.layout)
        loaded = dist_checkpointing.load(_sharded(self.policy, loading=True) | random_state, str(state))
        _set_state(self.policy, loaded)
        if self.critic is not None:
            _set_state(self.critic, dist_checkpointing.load(_sharded(self.critic, loading=True), str(state / _CRITIC)))
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
            (incomplete / _CRITIC if self.critic is not None else incomplete).mkdir(parents=True)
        dist.barrier()
        random_state = _sharded_random_state(self.policy.layout)
        dist_checkpointing.save(_sharded(self.policy, loading=False) | random_state, str(incomplete))
        if self.critic is not None:
            dist_checkpointing.save(_sharded(self.critic, loading=False), str(incomplete / _CRITIC))
        dist.barrier()
        if self.policy.layout.rank == 0:
            run = {
                "step": self.step,
                "version": self.version,
                "cursor": self.cursor,
                **self._identity(),
            }
            publish(incomplete, state, run, self.config.run.keep)
        dist.barrier()
        self._saved_step = self.step

    def _identity(self) -> dict[str, dict[str, Any]]:
        """What a state and the run that continues from it must have in common."""
        config, policy = self.config, self.policy
        return {
            "layout": config.parallel.layout(policy.layout.world_size),
            "precision": {"training.precision": config.training.precision},
            "model": asdict(policy.arch),
            **({_CRITIC: asdict(self.critic.arch)} if self.critic is not None else {}),
        }


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


def _sharded(model: TrainedModel, *, loading: bool) -> dict[str, Any]:
    """Everything of a model that updates change, as megatron's checkpoints describe it."""
    _ensure_adam_state(model)
    metadata = {
        "distrib_optim_sharding_type": _SHARDING,
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


def _differing(values: dict[str, Any], others: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items() if value != others.get(key))


def _ensure_adam_state(model: TrainedModel) -> None:
    """Create zero moments where no step was taken yet: a state without them can be neither saved nor loaded."""
    for optimizer in inner_optimizers(model.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


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
