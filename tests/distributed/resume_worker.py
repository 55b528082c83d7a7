"""On ranks: a resumed run against the one that went on, in the same layout and in others."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.config.run import Config
from dapo_megatron.run_state.checkpoint import RunState, load_latest
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import export_weights
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.optimizer import inner_optimizers
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.trained import TrainedModel
from tests.batches import make_config
from tests.training import differing, train

EXPECTED = "expected.pt"  # in a run's folder: everything of its saved state
STATES = ("param", "exp_avg", "exp_avg_sq")  # fp32 master weights and moments, as megatron calls them


def run_case(case: dict[str, Any]) -> list[str]:
    """Tensors of this rank that differ after one more step."""
    config = config_of(case, case["parallel"], save_every=2)
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


def run_move(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each layout in which a run is resumed: what differs from the one it was saved in.

    Returns:
        By layout: `differing`, the names of tensors and values that are not equal after loading, and `change`, the
        largest ||found - expected|| / ||expected|| of a weight's change in the next step. On rank 0 alone.
    """
    policy, critic, state = start(case, case["parallel"])
    train(policy, state, 2, critic)
    state.save()
    saved = everything(policy, critic, state)
    if dist.get_rank() == 0:
        torch.save(saved, Path(case["dir"]) / EXPECTED)
    train(policy, state, 1, critic)
    expected = everything(policy, critic, state)
    return {name: resume_elsewhere(case, layout, saved, expected) for name, layout in case["to"].items()}


def resume_elsewhere(
    case: dict[str, Any], layout: dict[str, Any], saved: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, Any]:
    policy, critic, state = start(case, layout)
    loaded = everything(policy, critic, state)
    train(policy, state, 1, critic)
    found = everything(policy, critic, state)
    if dist.get_rank():
        return {}
    assert loaded.keys() == saved.keys()
    changes = {name: (found[name] - loaded[name], expected[name] - saved[name]) for name in saved if "param " in name}
    return {
        "differing": [name for name, tensor in saved.items() if not torch.equal(loaded[name], tensor)],
        "change": max((float((ours - theirs).norm() / theirs.norm()) for ours, theirs in changes.values())),
    }


def start(case: dict[str, Any], layout: dict[str, Any]) -> tuple[Policy, Critic | None, RunState]:
    """A run in a layout: a new one, or resumed where one was saved."""
    config = config_of(case, layout)
    place = parallel.initialize(config.parallel, seed=1, threads=1)
    policy = Policy(config, place)
    critic = Critic(config, place) if config.algorithm.has_critic else None
    return policy, critic, load_latest(config, policy, critic)


def config_of(case: dict[str, Any], layout: dict[str, Any], save_every: int | None = None) -> Config:
    optimizer = {"lr": 1e-3, "warmup_steps": 10, "eps": case.get("eps", 1e-8)}
    ppo = {"algorithm": {"advantage": {"estimator": "gae"}}, "critic": {"optimizer": optimizer}}
    return make_config(
        case["model"],
        run={"dir": case["dir"], "save_every": save_every},
        parallel=layout,
        training={"precision": case["precision"], "micro_batch_tokens": 192},
        optimizer=optimizer,
        **(ppo if case.get("critic") else {}),
    )


def everything(policy: Policy, critic: Critic | None, state: RunState) -> dict[str, Tensor]:
    """All that a run goes on from, whole and under names that no layout changes. Complete on rank 0."""
    found = {"step": torch.tensor([state.step, state.version, state.cursor.get("position", 0)])}
    for role, model in (("policy", policy), ("critic", critic)):
        if model is not None:
            found |= {f"{role} {name}": tensor.clone() for name, tensor in whole_tensors(model)}
    return found


def whole_tensors(model: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights, master weights, moments, step counts and learning rates of a model."""
    steps = {float(state["step"]) for inner in inner_optimizers(model.optimizer) for state in inner.state.values()}
    yield "steps", torch.tensor(sorted(steps))
    yield "learning rates", torch.tensor([group["lr"] for group in model.optimizer.param_groups])
    states = optimizer_states(model)
    if model.layout.sends_weights:
        for name, tensor in export_weights(model.chunks):
            yield f"weight {name}", tensor
        for kind in STATES:
            for name, tensor in export_weights(model.chunks, partial(whole_state, states, kind)):
                yield f"{kind} {name}", tensor
    yield from value_head(model, states)


States = dict[torch.nn.Parameter, dict[str, Tensor]]


def whole_state(states: States, kind: str, parameter: torch.nn.Parameter) -> Tensor:
    return states[parameter][kind]


def optimizer_states(model: TrainedModel) -> States:
    """The optimizer's state of each local parameter, of its shape, put together from the data-parallel ranks'."""
    states: States = {}
    for member in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        for parameter in (parameter for buffer in member.buffers for parameter in buffer.params):
            whole = {kind: torch.zeros(parameter.numel()) for kind in STATES}
            if parameter in member.model_param_group_index_map:
                stretch = member._get_model_param_range_map(parameter)["param"]
                mine = member._get_main_param_and_optimizer_states(parameter)
                for kind in STATES:
                    whole[kind][stretch.start : stretch.end] = mine[kind].detach().view(-1)
            for tensor in whole.values():
                dist.all_reduce(tensor, group=member.data_parallel_group)
            states[parameter] = {kind: tensor.view(parameter.shape) for kind, tensor in whole.items()}
    return states


def value_head(model: TrainedModel, states: States) -> Iterator[tuple[str, Tensor]]:
    """A critic's, of which only the last stage has one and which no Hugging Face checkpoint knows."""
    if not isinstance(model, Critic):
        return
    weight = model.chunks[-1].output_layer.weight if model.chunks[-1].post_process else None
    mine = None if weight is None else {"weight": weight.detach(), **states[weight]}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    for kind, tensor in next(head for head in every if head is not None).items():
        yield f"{kind} value head", tensor


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    outcome: dict[str, Any] = {}
    for case in job["cases"]:
        mine = run_case(case)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        outcome[case["name"]] = every
    for case in job["moves"]:
        outcome[case["name"]] = run_move(case)
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
