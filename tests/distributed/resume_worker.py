"""Under torchrun: in several layouts, a resumed run and the one that went on, bit by bit."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dapo_megatron.run_state.checkpoint import RunState, load_latest
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.policy import Policy
from tests.batches import make_config
from tests.training import differing, train


def run_case(case: dict[str, Any]) -> list[str]:
    """Tensors of this rank that differ after one more step."""
    config = make_config(
        case["model"],
        run={"dir": case["dir"], "save_every": 2},
        parallel=case["parallel"],
        training={"precision": case["precision"]},
        optimizer={"lr": 1e-3, "warmup_steps": 10},
    )
    layout = parallel.initialize(config.parallel, seed=1, threads=1)
    policy = Policy(config, layout)
    state = RunState(config, policy)
    train(policy, state, 2)  # saved after the second
    resumed = Policy(config, layout)
    continued = load_latest(config, resumed)
    assert continued.step == 2
    wrong = differing(resumed, policy)
    train(policy, state, 1)
    train(resumed, continued, 1)
    return wrong + differing(resumed, policy)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    outcome: dict[str, list[list[str]]] = {}
    for case in job["cases"]:
        mine = run_case(case)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        outcome[case["name"]] = every
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
