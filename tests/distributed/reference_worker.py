"""On ranks: the reference policy's log-probs, and the policy's gradients after its pass, in pairs of layouts."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.batching import Batch
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response
from dapo_megatron.trainer.reference import Reference
from dapo_megatron.trainer.verify_layout import compare, nearby_log_probs, random_batch
from tests.batches import make_config


def build(case: dict[str, Any], *, reference: bool) -> tuple[Policy, Reference | None]:
    """The policy of a case and its reference, in fresh groups."""
    config = make_config(
        case["model"],
        parallel=case["policy"],
        reference={"path": case.get("reference_model"), "parallel": case["reference"]},
        algorithm={"kl": {"coefficient": 0.5}},
        rollout={"prompts_per_step": 6, "samples_per_prompt": 4},
        training={"mini_batch": 24, "micro_batch_tokens": 192},
        optimizer={"lr": 0.05, "eps": 1e-3},
    )
    layout = parallel.initialize(config.parallel, seed=1, threads=1)
    policy = Policy(config, layout)
    return policy, Reference(config, layout) if reference else None


def two_updates(policy: Policy, batch: Batch) -> list[Tensor]:
    """This rank's main gradients of the first update, and its weights after the second."""
    (mini_batch,) = batch.mini_batches()
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    policy.start_step()
    policy.gradients(mini_batch)
    gradients = [p.main_grad.clone() for p in parameters]
    policy.apply_gradients(mini_batch)
    policy.update(mini_batch)
    return gradients + [p.detach().clone() for p in parameters]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """The log-probs' error, and on how many ranks each thing is not as it must be."""
    policy, reference = build(case, reference=True)
    assert reference is not None
    batch = random_batch(policy)
    batch.set_old_log_probs(nearby_log_probs(batch, policy.log_probs(batch)))
    found = reference.log_probs(batch)
    every = gather_by_response(batch.micro_batches(), found)
    last = policy.layout.pipeline_rank == policy.layout.pipeline - 1
    lengths = [len(micro.responses) if last else 0 for micro in batch.micro_batches()]
    batch.set_reference_log_probs(found)
    with_reference = two_updates(policy, batch)
    changed = not all(map(torch.equal, found, reference.log_probs(batch)))

    policy, _ = build(case, reference=False)
    batch = random_batch(policy)
    batch.set_old_log_probs(nearby_log_probs(batch, policy.log_probs(batch)))
    batch.set_reference_log_probs(found)
    trace = not all(map(torch.equal, with_reference, two_updates(policy, batch)))
    flags = torch.tensor([[len(v) for v in found] != lengths, changed, trace], dtype=torch.int)
    dist.all_reduce(flags)
    outcome = dict(zip(("misplaced", "changed", "trace"), flags.tolist(), strict=True))
    return outcome | ({"error": error_of(case, every)} if dist.get_rank() == 0 else {})


def error_of(case: dict[str, Any], log_probs: dict[int, Tensor]) -> float:
    """The largest error of a response's log-probs, against those of the case that is stored."""
    results = {str(response): values for response, values in log_probs.items()}
    if case.get("is_reference"):
        save_file(results, case["stored"])
    expected = load_file(case["stored"])
    assert results.keys() == expected.keys()
    return max(compare(results.items(), expected.__getitem__).values())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for case in job["cases"]:
        found[case["name"]] = run_case(case)
        dist.barrier()
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
