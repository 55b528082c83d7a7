"""Under torchrun: loss, log-probs and gradients of one batch in several layouts, against a stored reference."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import export_weights
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response
from tests.batches import load_batch, make_config, old_log_probs


def compute_in_fp64(policy: Policy) -> None:
    """Forward and backward passes in fp64; the main gradients stay fp32.

    SmolLM2's residual stream reaches 23,000, so fp32 arithmetic alone is off by 5e-5 of the exact gradient on one
    rank already. With fp64 what remains are the layout's own errors.
    """
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.double()
    policy.model.config.params_dtype = policy.model.config.pipeline_dtype = torch.float64


def run_case(model: str, case: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """One layout: metrics, and tensors `log_probs/<response>` and `grad/<name>` on the ranks of replica 0."""
    config = make_config(model, parallel=case.get("parallel", {}), training=case.get("training", {}))
    policy = Policy(config, parallel.initialize(config.parallel, seed=1, threads=1))
    if case.get("arithmetic") == "fp64":
        compute_in_fp64(policy)
    batch = load_batch(policy)
    own = policy.log_probs(batch)
    every = gather_by_response(batch.micro_batches(), own)
    old = old_log_probs(batch.header, every)
    batch.set_old_log_probs(
        [
            torch.cat([old[r] for r in dict.fromkeys(micro.responses.tolist())])
            if len(micro.responses)
            else torch.empty(0)
            for micro in batch.micro_batches()
        ]
    )
    (mini_batch,) = batch.mini_batches()
    metrics = policy.gradients(mini_batch, force_all_reduce=True)
    results = {f"log_probs/{r}": values for r, values in every.items()}
    if policy.layout.sends_weights:
        results |= {f"grad/{name}": g.clone() for name, g in export_weights(policy.model, lambda p: p.main_grad)}
    batch.set_old_log_probs(own)
    on_policy = policy.gradients(mini_batch)
    metrics["on_policy_log_ratio"], metrics["on_policy_clipped"] = (
        on_policy["log_ratio_abs"],
        on_policy["clip_high"] + on_policy["clip_low"],
    )
    return metrics, results


def compare(results: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    for name, expected in reference.items():
        found = results[name]
        assert found.shape == expected.shape, name
        yield name, float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    outcome: dict[str, Any] = {}
    for case in job["cases"]:
        metrics, results = run_case(job["model"], case)
        if dist.get_rank() == 0:
            reference = Path(job["reference"])
            if case.get("is_reference"):
                save_file(results, reference)
            errors = dict(compare(results, load_file(reference)))
            worst = max(errors, key=errors.__getitem__)
            outcome[case["name"]] = {
                "metrics": metrics,
                "worst": worst,
                "error": errors[worst],
                "compared": len(errors),
            }
        dist.barrier()
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
