"""On ranks: attention with context parallelism against attention on one rank, and its peak memory."""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dapo_megatron.trainer import device

device.import_megatron()

from megatron.core import parallel_state  # noqa: E402

from dapo_megatron.trainer.attention import PackedCoreAttention, local_index, pack  # noqa: E402

CPU = torch.device("cpu")
CONFIG = SimpleNamespace()


def random_inputs(case: dict[str, Any], seed: int) -> list[Tensor]:
    """Query, key, value [T, 1, heads, dim] and the output's gradient, the same on every rank of a group."""
    generator = torch.Generator().manual_seed(seed)
    total, dim, heads, kv_heads = sum(case["lengths"]), case["dim"], case["heads"], case["kv_heads"]
    shapes = [(total, 1, h, dim) for h in (heads, kv_heads, kv_heads)]
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [*shapes, (total, 1, heads * dim)]
    ]
    return [x.to(getattr(torch, case["dtype"])) for x in drawn]


def attend(attention: Callable[..., Tensor], inputs: list[Tensor], packed: Any, recompute: str = "") -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    *qkv, weights = (x.detach().requires_grad_() for x in inputs)

    def forward(*qkv: Tensor) -> Tensor:
        return attention(*qkv, packed_seq_params=packed)

    out = checkpoint(forward, *qkv, use_reentrant=recompute == "reentrant") if recompute else forward(*qkv)
    out.backward(weights.detach())
    return [out.detach(), *(x.grad for x in qkv)]


def relative_errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """||found - expected|| / ||expected||, with both summed over all ranks."""
    names = ("out", "query", "key", "value")
    norms = torch.tensor(
        [
            [(f.double() - e.double()).square().sum(), e.double().square().sum()]
            for f, e in zip(found, expected, strict=True)
        ]
    )
    dist.all_reduce(norms)
    return dict(zip(names, (norms[:, 0] / norms[:, 1]).sqrt().tolist(), strict=True))


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of context parallelism against one rank; both against fp64 where the case asks for it."""
    size, lengths = case["cp"], case["lengths"]
    group = parallel_state.get_context_parallel_group()
    inputs = random_inputs(case, seed=dist.get_rank() // size)  # groups must not mix
    attention = PackedCoreAttention(CONFIG, pg_collection=SimpleNamespace(cp=group) if case.get("given") else None)
    packed = pack(lengths, CPU, cp_size=size, cp_rank=group.rank())
    index = local_index(lengths, size, group.rank())
    local = [x[index] for x in inputs]
    found = attend(attention, local, packed, case.get("recompute", ""))
    with torch.no_grad():
        assert torch.equal(attention(*local[:3], packed_seq_params=packed), found[0])
    alone = [x[index] for x in attend(attention, inputs, pack(lengths, CPU))]
    result: dict[str, Any] = {"error": relative_errors(found, alone), "dtypes": sorted({str(x.dtype) for x in found})}
    if case.get("against_fp64"):
        exact = [x[index] for x in attend(attention, [x.double() for x in inputs], pack(lengths, CPU))]
        result |= {"rounding": relative_errors(found, exact), "rounding_alone": relative_errors(alone, exact)}
    return result


def peak_rss() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peak memory (bytes, the largest of all ranks) of forward and backward."""
    size, lengths = case["cp"], case["lengths"]
    group = parallel_state.get_context_parallel_group()
    index = local_index(lengths, size, group.rank())
    local = [x[index] for x in random_inputs(case, seed=0)]
    attention = PackedCoreAttention(CONFIG)
    before, begun = peak_rss(), time.monotonic()
    attend(attention, local, pack(lengths, CPU, cp_size=size, cp_rank=group.rank()))
    seconds, peak = time.monotonic() - begun, peak_rss()
    memory = torch.tensor([peak, peak - before])
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    return dict(zip(("peak_rss", "growth"), memory.tolist(), strict=True)) | {"seconds": seconds}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group(device.backend())
    outcome: dict[str, Any] = {}
    for case in job["cases"]:
        parallel_state.initialize_model_parallel(context_parallel_size=case["cp"])
        outcome[case["name"]] = (measure if case.get("measure") else compare)(case)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
