"""How much a delta push saves: the weights that a recorded run trains, step by step, at the learning rates given.

    python benchmarks/delta.py CONFIG [KEY=VALUE ...] --replay runs/addition/rollouts [--steps 3] [--lr 1e-5 1e-6]

Each rate trains anew on the recorded batches of a run (its `rollouts` folder), with a single rank and without servers.
What every push would send is counted by the encoder of `fleet.delta_push` itself. The columns:

- unchanged: share of the values that the step left as they were, bit by bit;
- sent: bytes of the delta push / bytes of a plain one.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.rollout.handle import StopRun, open_rollouts
from dapo_megatron.sync.delta import DeltaSender
from dapo_megatron.sync.proof import proved_plan
from dapo_megatron.sync.sender import Sender
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import WeightSource
from dapo_megatron.trainer.feed import Feed
from dapo_megatron.trainer.learner import Learner
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import on_rank_zero

BITS = {2: torch.int16, 4: torch.int32}


class Nobody:
    """A channel that takes everything at once."""

    def start_broadcast(self, buffer: Tensor, timeout: float) -> int:
        """The bytes that would travel."""
        return buffer.nbytes

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to leave."""


class Weights:
    """What is pushed of a policy, and how much of it each push changes."""

    def __init__(self, config: Config, policy: Policy) -> None:
        plan = proved_plan(config, policy.arch, 1)
        (group,) = plan.groups
        self._channels = {group: DeltaSender(Nobody(), plan.buckets)}
        self._sender = Sender(plan, WeightSource(policy.chunks), 0, "gloo")
        self._policy, self._dtype = policy, getattr(torch, config.fleet.dtype)
        self._last: dict[str, Tensor] = {}

    def push(self) -> tuple[int, int, int]:
        """Values, values whose bits changed since the last push, and bytes that a delta push sends."""
        values = changed = 0
        for name, tensor in self._policy.export():
            now = tensor.to(self._dtype).view(BITS[self._dtype.itemsize]).clone()
            values += now.numel()
            changed += int((now != self._last.get(name, now)).sum())
            self._last[name] = now
        return values, changed, self._sender.send(self._channels, lambda: None, lambda: None, float("inf")).bytes


def train(config: Config, layout: parallel.Layout) -> Iterator[tuple[int, int, int]]:
    """`Weights.push` before the first step and after each."""
    learner = Learner(config, layout)
    weights = Weights(config, learner.policy)
    yield weights.push()
    with open_rollouts(config, 0, on_rank_zero) as rollouts:
        feed = Feed(rollouts, lambda *_: None, config, learner.policy, lambda *_: None)
        for step in range(config.run.steps):
            batch = feed.next_batch(step + 1, step)
            assert not isinstance(batch, StopRun)
            learner.prepare(batch)
            learner.start_step()
            for mini_batch in batch.mini_batches():
                learner.update(mini_batch)
            yield weights.push()


def main() -> None:
    """Print a line for each step of each learning rate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--replay", required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-6])
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    print("    lr  step  unchanged    sent")
    for lr in arguments.lr:
        own = [f"rollout.replay={arguments.replay}", f"run.steps={arguments.steps}", f"optimizer.lr={lr}"]
        config = load_config(arguments.config, [*arguments.overrides, *own, "evaluation.data=null"])
        layout = parallel.initialize(config.parallel, config.run.seed, config.training.threads)
        whole = 0
        for step, (values, changed, sent) in enumerate(train(config, layout)):
            whole = whole or sent  # the first push is plain
            if step:
                print(f"{lr:6.0e}  {step:4d}  {1 - changed / values:8.2%}  {sent / whole:6.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
