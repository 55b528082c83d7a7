"""On ranks: everything that the critic computes, in many layouts, against stored references; resumed critics."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.run_state.checkpoint import RunState, load_latest
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import export_weights
from dapo_megatron.trainer.critic import Critic
from dapo_megatron.trainer.policy import Metrics, Policy
from dapo_megatron.trainer.ranks import gather_by_response
from dapo_megatron.trainer.verify_layout import compare
from tests.batches import make_config
from tests.critic import critic_batch, head_of, set_head, set_targets
from tests.training import differing, train


def critic_config(case: dict[str, Any], **sections: Any) -> Any:
    """As in `layout_worker`: an optimizer whose updates show a wrong gradient, and a norm that is clipped."""
    return make_config(
        case["model"],
        parallel=case.get("parallel", {}),
        training={"mini_batch": 24, "micro_batch_tokens": 192} | case.get("training", {}),
        rollout={"prompts_per_step": 6, "samples_per_prompt": 4},
        algorithm={"advantage": {"estimator": "gae"}},
        critic={"optimizer": {"lr": 0.05, "eps": 1e-3, "clip_grad": 0.05, "warmup_steps": 0}},
        **sections,
    )


def run_layout(case: dict[str, Any]) -> tuple[Metrics, dict[str, Tensor]]:
    """Metrics of two updates, and the tensors of the first: values, main gradients, and how the weights change."""
    config = critic_config(case)
    critic = Critic(config, parallel.initialize(config.parallel, seed=1, threads=1))
    set_head(critic)
    batch = critic_batch(critic)
    own = critic.values(batch)
    results = {f"values/{r}": values for r, values in gather_by_response(batch.micro_batches(), own).items()}
    set_targets(batch, own)
    (mini_batch,) = batch.mini_batches()
    metrics = critic.gradients(mini_batch, force_all_reduce=True)
    results |= tensors(critic, "grad", lambda parameter: parameter.main_grad)
    before = tensors(critic, "change", lambda parameter: parameter.data)
    critic.start_step()
    metrics |= {"first_norm": critic.apply_gradients(mini_batch)["grad_norm"]} | critic.update(mini_batch)
    after = tensors(critic, "change", lambda parameter: parameter.data)
    return metrics, results | {name: after[name] - before[name] for name in after}


def tensors(critic: Critic, kind: str, value: Any) -> dict[str, Tensor]:
    """`value` of every parameter on the ranks that export, and of the head, from the last stage, on all."""
    found = {}
    if critic.layout.sends_weights:
        found = {f"{kind}/{name}": tensor.clone() for name, tensor in export_weights(critic.chunks, value)}
    head = head_of(critic)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, None if head is None else value(head).clone())
    heads = [tensor for tensor in every if tensor is not None]
    assert all(torch.equal(tensor, heads[0]) for tensor in heads)  # data- and tensor-parallel ranks agree
    return found | {f"{kind}/head": heads[0]}


def run_resume(case: dict[str, Any]) -> list[str]:
    """Tensors of this rank that differ between a resumed critic and the one that went on, and whether any was wrong."""
    config = critic_config(case, run={"dir": case["dir"], "save_every": 2})
    layout = parallel.initialize(config.parallel, seed=1, threads=1)
    policy, critic = Policy(config, layout), Critic(config, layout)
    state = RunState(config, policy, critic)
    train(policy, state, 2, critic)  # saved after the second
    resumed = Policy(config, layout), Critic(config, layout)
    continued = load_latest(config, *resumed)
    assert continued.step == 2
    wrong = differing(resumed[1], critic)
    train(policy, state, 1, critic)
    train(resumed[0], continued, 1, resumed[1])
    return wrong + differing(resumed[0], policy) + differing(resumed[1], critic)


def layout_outcome(case: dict[str, Any]) -> dict[str, Any]:
    """Metrics of rank 0 and the error of each tensor; those of the first layout are the reference of its model."""
    metrics, results = run_layout(case)
    if dist.get_rank():
        return {}
    reference = Path(case["reference"])
    if not reference.exists():
        save_file({name: tensor.contiguous() for name, tensor in results.items()}, reference)
    expected = load_file(reference)
    assert results.keys() == expected.keys()
    return {"metrics": metrics, "errors": compare(results.items(), expected.__getitem__)}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for case in job["cases"]:
        if "dir" in case:
            every: list[Any] = [None] * dist.get_world_size()
            mine = run_resume(case)
            dist.all_gather_object(every, mine)
            found[case["name"]] = every
        else:
            found[case["name"]] = layout_outcome(case)
        dist.barrier()
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
