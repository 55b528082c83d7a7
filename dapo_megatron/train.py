"""The training loop. Every rank of torchrun runs it: `torchrun ... -m dapo_megatron.train CONFIG [KEY=VALUE ...]`."""

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from dapo_megatron.checkpoint.export import export_hf
from dapo_megatron.config.load import load_config
from dapo_megatron.config.preflight import preflight
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.monitoring.monitor import Monitor
from dapo_megatron.processes import die_with_parent
from dapo_megatron.rollout.handle import StopRun, open_rollouts
from dapo_megatron.run_state.checkpoint import RunState, load_latest
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.colocated import start_servers
from dapo_megatron.trainer.feed import Feed
from dapo_megatron.trainer.learner import Learner
from dapo_megatron.trainer.ranks import on_rank_zero
from dapo_megatron.trainer.trained import Metrics
from dapo_megatron.trainer.weights import WeightSync

END_GRACE = 30.0  # seconds a rank may take to stop its controller and servers when its launcher has died


def train(config: Config, layout: parallel.Layout) -> None:
    """Train from the newest saved state, or from the start, to `run.steps`."""
    with open_rollouts(config, layout.rank, on_rank_zero) as rollouts:
        start_servers(config, rollouts)  # those on the trainer's own GPUs alone: they come first, and sleep
        learner = Learner(config, layout)  # while other servers start
        state = load_latest(config, learner.policy, learner.critic)
        with Monitor(config, config.run.dir, enabled=layout.rank == 0, start_step=state.step) as monitor:
            rollouts.wait_ready(partial(monitor.progress, "start"))
            with WeightSync(config, learner.policy, rollouts, learner.models) as weights:
                feed = Feed(rollouts, weights.admit, config, learner.policy, monitor.progress)
                weights.verify(state.version)
                if state.step == 0:
                    evaluate(feed, state, monitor, "before")
                run(config, learner, feed, weights, state, monitor)
                evaluate(feed, state, monitor, "after")
            monitor.summary()


def run(config: Config, learner: Learner, feed: Feed, weights: WeightSync, state: RunState, monitor: Monitor) -> None:
    """Step by step to the end of the run; the last state is saved and the model exported."""
    every = config.evaluation.every
    while state.step < config.run.steps and step(learner, feed, weights, state, monitor):
        if every and state.step % every == 0 and state.step < config.run.steps:
            evaluate(feed, state, monitor, f"step_{state.step}")
    with monitor.phase("save"):
        state.save()
        if config.run.export:
            export_hf(config, learner.policy)


def step(learner: Learner, feed: Feed, weights: WeightSync, state: RunState, monitor: Monitor) -> bool:
    """One step of Algorithm 1 (arXiv 2503.14476). False where the run ends here by its own rule."""
    with monitor.phase("rollout"):
        batch = feed.next_batch(state.step + 1, state.version)  # dynamic sampling until N mixed groups; looks ahead
    if isinstance(batch, StopRun):
        monitor.note(f"the run ends here: {batch.reason}")
        return False
    header, signal = batch.header, Metrics()
    updates: list[Metrics] = []
    if header.num_responses:
        weights.begin_training()  # servers on the same GPUs sleep until the push
        with monitor.phase("old_log_probs"):
            signal = learner.prepare(batch)  # log-probs under pi_old, then advantages
        learner.start_step()
        with monitor.phase("update"):
            for i, mini_batch in enumerate(batch.mini_batches()):
                updates.append(learner.update(mini_batch))
                monitor.progress("update", i + 1, batch.num_updates)
        learner.finish_step()
        with monitor.phase("push"):
            weights.push(state.version + 1)  # every server, hashes checked, prefix caches reset
    with monitor.phase("save"):
        state.finish_step(header.cursor, state.version + bool(updates))
    counts = {"updates": float(len(updates)), "skipped": float(not updates)}
    monitor.step(state.step, header.stats | signal | counts | learner.combine(updates))
    return True


def evaluate(feed: Feed, state: RunState, monitor: Monitor, name: str) -> None:
    """Accuracy on the held-out prompts, where there are any. Answers of later steps may be under way."""
    with monitor.phase("evaluation"):
        result = feed.evaluate(name, state.version)
    if result is not None:
        monitor.evaluation(name, result)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry of every rank: exit code 0, 2 for a user error, 130 for Ctrl-C, 1 for anything else."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `with` blocks are left
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid(), END_GRACE)  # a launcher that is killed outright tells its ranks nothing
    try:
        config = load_config(arguments[0], arguments[1:])
        layout = parallel.initialize(config.parallel, config.run.seed, config.training.threads)
        on_rank_zero(lambda: preflight(config, layout.world_size))
        train(config, layout)
        dist.destroy_process_group()
        sys.exit(0)
    except UserError as error:  # every rank raises it; one tells
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"dapo-megatron: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
