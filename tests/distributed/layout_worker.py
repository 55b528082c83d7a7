"""On ranks: everything that a training step computes, in many layouts, against stored references."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.algorithm.advantage import group_advantages
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.batching import Batch, MiniBatch, load_batch
from dapo_megatron.trainer.build import export_weights
from dapo_megatron.trainer.columns import gather_column
from dapo_megatron.trainer.policy import Metrics, Policy
from dapo_megatron.trainer.ranks import gather_by_response
from dapo_megatron.trainer.verify_layout import compare, compute_in_fp64, nearby_log_probs, random_batch
from tests.batches import make_config, partly_old

# Name, and what it replaces in the `algorithm` section. Responses' ratios stay nearer to 1 than tokens'.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sequence_mean": {"aggregation": "sequence_mean", "kl": {"coefficient": 0.5}},
    "gspo": {
        "loss": "gspo",
        "aggregation": "sequence_mean",
        "clip": {"low": 0.05, "high": 0.07},
        "entropy_coefficient": 0.1,
        # The made-up engine is far from the model: some responses' weights lie within these bounds, some do not.
        "rollout_correction": {"mode": "mis", "level": "sequence_mean", "low": 0.05},
    },
    "token_mean": {},
}
ON_POLICY = "sequence_mean"  # the others start from an older policy, so that clipping acts
PARTLY_OLD = "gspo"  # of some responses, a part or all is of weights too old for the loss
SAMPLES = 4


def make_policy(model: str, case: dict[str, Any]) -> Policy:
    """The policy of a case, with an optimizer whose updates show a wrong gradient.

    Adam's own updates hardly depend on the gradient's scale and blow rounding up where it is near zero; an epsilon of
    the gradient's size makes them depend on it, smoothly. Clipping acts, so that a wrong norm shows as well.
    """
    prompts = case.get("prompts", 6)
    config = make_config(
        model,
        parallel=case.get("parallel", {}),
        training={"mini_batch": prompts * SAMPLES, "micro_batch_tokens": 192} | case.get("training", {}),
        rollout={"prompts_per_step": prompts, "samples_per_prompt": SAMPLES},
        optimizer={"lr": 0.05, "eps": 1e-3, "clip_grad": 0.05},
    )
    policy = Policy(config, parallel.initialize(config.parallel, seed=1, threads=1))
    if case.get("arithmetic") == "fp64":
        compute_in_fp64(policy)
    return policy


def run_case(model: str, case: dict[str, Any]) -> tuple[dict[str, Metrics], dict[str, Tensor]]:
    """Metrics by objective; tensors on the ranks that export."""
    policy = make_policy(model, case)
    if case.get("export"):
        return {}, {name: tensor.clone() for name, tensor in policy.export()} if policy.layout.sends_weights else {}
    batch = random_batch(policy)
    (mini_batch,) = batch.mini_batches()
    own = policy.log_probs(batch)
    results = {f"log_probs/{r}": values for r, values in gather_by_response(batch.micro_batches(), own).items()}
    batch.set_reference_log_probs(nearby_log_probs(batch, nearby_log_probs(batch, own)))  # further than the old policy
    metrics: dict[str, Metrics] = {}
    for name in case.get("objectives", OBJECTIVES):
        policy.config.algorithm = type(policy.config.algorithm).model_validate(OBJECTIVES[name])
        batch.set_old_log_probs(own if name == ON_POLICY else nearby_log_probs(batch, own))
        trained = without_old_tokens(policy, batch, own) if name == PARTLY_OLD else mini_batch
        metrics[name] = policy.gradients(trained, force_all_reduce=True)
        if policy.layout.sends_weights:
            gradients = export_weights(policy.chunks, lambda parameter: parameter.main_grad)
            results |= {f"grad {name}/{parameter}": g.clone() for parameter, g in gradients}
    if case.get("arithmetic") != "fp64":
        changes, metrics["updates"] = update_twice(policy, mini_batch)
        results |= {f"change/{name}": change for name, change in changes.items()}
    return metrics, results


def without_old_tokens(policy: Policy, batch: Batch, own: list[Tensor]) -> MiniBatch:
    """The batch again; of every four responses, the second is half, the third completely out of the loss."""
    header = batch.header
    old = np.array([0, 1, 2, 0])[np.arange(header.num_responses) % 4] * header.response_lengths // 2
    header = replace(partly_old(header, old), oldest_in_loss=1)
    young = load_batch(header, policy.packing, policy.layout, batch.fetch)
    column = gather_column(batch, own, policy.layout)
    last_stage = policy.layout.pipeline_rank == policy.layout.pipeline - 1
    picked = young.pick(column) if last_stage else [torch.empty(0) for _ in young.micro_batches()]
    young.set_old_log_probs(nearby_log_probs(young, picked))
    young.set_advantages(group_advantages(torch.from_numpy(header.rewards), torch.from_numpy(header.groups)))
    (mini_batch,) = young.mini_batches()
    return mini_batch


def update_twice(policy: Policy, mini_batch: MiniBatch) -> tuple[dict[str, Tensor], Metrics]:
    """How the weights change, and the norm of each gradient. The first update is from the gradients that are there."""
    policy.start_step()
    _, first, _ = policy.optimizer.step()
    norms = {"first": float(first), "second": policy.update(mini_batch)["grad_norm"]}
    if not policy.layout.sends_weights:
        return {}, norms
    before = load_file(Path(policy.config.model.path) / "model.safetensors")
    return {name: weight - before[name] for name, weight in policy.export()}, norms


def outcome_of(case: dict[str, Any], metrics: dict[str, Metrics], results: dict[str, Tensor]) -> dict[str, Any]:
    """Metrics, and the largest error of each kind of tensor with its name."""
    reference = Path(case["reference"])
    if case.get("is_reference"):
        save_file({name: tensor.contiguous() for name, tensor in results.items()}, reference)
    expected = load_file(reference)
    assert results.keys() == expected.keys()
    worst: dict[str, tuple[float, str]] = {}
    for name, error in compare(results.items(), expected.__getitem__).items():
        kind = name.partition("/")[0]
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, name))
    return {"metrics": metrics, "worst": worst}


def outcomes(cases: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for case in cases:
        metrics, results = run_case(case["model"], case)
        if dist.get_rank() == 0:
            yield case["name"], outcome_of(case, metrics, results)
        dist.barrier()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    found = dict(outcomes(job["cases"]))
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
