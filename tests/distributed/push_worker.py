"""On ranks: pushes from Megatron layouts to servers without vLLM, which rank 0 has in threads."""

import json
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.table import exact_tensors
from dapo_megatron.sync.buckets import HASHES
from dapo_megatron.sync.plan import ServerLayout, TransferPlan, compile_plan
from dapo_megatron.sync.proof import prove
from dapo_megatron.sync.pusher import Member, WeightPusher
from dapo_megatron.sync.same_host_pusher import SameHostPusher
from dapo_megatron.sync.server_admin import ServerError
from dapo_megatron.trainer import parallel
from dapo_megatron.trainer.build import WeightSource, build_model, export_weights, load_weights
from dapo_megatron.trainer.pushers import WholeSource
from dapo_megatron.trainer.ranks import on_rank_zero
from tests.fake_fleet import FakeServer, fake_fleet
from tests.pushing import equal

BUCKET_BYTES = 1 << 14  # a few rows; an embedding has a turn of its own
TIMEOUT = 200.0
SHORT = 10.0  # of a push to a server that freezes


def make_pusher(case: dict[str, Any]) -> tuple[WeightPusher, TransferPlan]:
    """A pusher of the case's model in the case's layout."""
    sizes = ParallelConfig.model_validate(case.get("parallel", {}))
    layout = parallel.initialize(sizes, seed=1, threads=1)
    arch, dtype = architecture_of(case["model"]), case["dtype"]
    chunks = build_model(arch, sizes, TrainingConfig.model_validate({"precision": "fp32"}), temperature=1.0)
    reader = open_weights(Path(case["model"]))
    for chunk in chunks:
        load_weights(chunk, reader)
    server = ServerLayout(**case.get("server", {}))
    same_host, ranks = case.get("same_host", False), layout.world_size
    if same_host:  # planned as for one rank with the whole model
        sizes, ranks = ParallelConfig.model_validate({}), 1
    plan = compile_plan(arch, sizes, ranks, server, dtype=dtype, bucket_bytes=BUCKET_BYTES)
    prove(plan, arch, sizes, ranks, dtype=dtype)
    options: dict[str, Any] = {"rank": layout.rank, "agree": on_rank_zero, "host": "127.0.0.1"}
    options |= {"timeout": TIMEOUT, "backend": "gloo"}
    if same_host:
        return SameHostPusher(plan, WholeSource(lambda: export_weights(chunks)), **options), plan
    return WeightPusher(plan, WeightSource(chunks), **options), plan


def members(servers: list[FakeServer] | None) -> list[Member]:
    """The servers of rank 0, on every rank."""
    urls = on_rank_zero(lambda: [server.url for server in servers or []])
    return [Member(f"server_{i}", url, "token") for i, url in enumerate(urls)]


def expected_tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    """What must arrive."""
    exact = exact_tensors(architecture_of(case["model"]))
    stored = load_file(Path(case["model"]) / "model.safetensors")
    return {
        name: tensor.to(torch.float32 if name in exact else getattr(torch, case["dtype"]))
        for name, tensor in stored.items()
    }


def check_received(server: FakeServer, expected: dict[str, Tensor]) -> None:
    """What the workers of a server got makes up every tensor, byte for byte."""
    missing = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in expected.items()}
    for received in server.received:
        for stretch, view in received:
            part = expected[stretch.name].narrow(stretch.dim, stretch.start, stretch.stop - stretch.start)
            assert equal(view, part), f"{stretch} arrived otherwise than it is stored"
            missing[stretch.name].narrow(stretch.dim, stretch.start, stretch.stop - stretch.start).fill_(False)
    assert not [name for name, places in missing.items() if places.any()]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Pushes twice to two servers, then with the hashes that NCCL's buffers get; rank 0 looks at what arrived."""
    pusher, plan = make_pusher(case)
    with fake_fleet(2, plan.server.workers) if dist.get_rank() == 0 else nullcontext() as servers:
        pusher.connect(members(servers))
        reports = [pusher.push(1), pusher.push(2)]
        with patch.dict(HASHES, gloo=HASHES["nccl"]):
            reports.append(pusher.push(3))
        if servers:
            expected = expected_tensors(case)
            for server in servers:
                assert server.versions == [1, 2, 3]
                check_received(server, expected)
            assert reports[1].tensors == len(expected)
        pusher.close()
    return {"senders": list(reports[1].bytes), "bytes": sum(reports[1].bytes.values()), "groups": len(plan.groups)}


def run_faults(case: dict[str, Any]) -> dict[str, Any]:
    """A server that dies, refuses or freezes in the middle of a push: all ranks are told, the rest goes on."""
    pusher, plan = make_pusher(case)
    found: dict[str, Any] = {}
    for name, fault in FAULTS.items():
        with fake_fleet(2, plan.server.workers) if dist.get_rank() == 0 else nullcontext() as servers:
            both = members(servers)
            pusher.connect(both)
            THAW.clear()
            if servers:
                servers[1].fault = fault
            pusher._timeout = SHORT if name == "freezes" else TIMEOUT
            try:
                pusher.push(1)
                error: Any = ("none", "")
            except ServerError as caught:
                error = (caught.url, str(caught))
            errors: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            THAW.set()
            pusher._timeout = TIMEOUT
            pusher.connect(both[:1])
            pusher.push(2)
            if servers:
                check_received(servers[0], expected_tensors(case))
                assert servers[0].versions == [2]
            same = all(e == error for e in errors)
            found[name] = {"blamed": error[0] == both[1].url, "text": error[1], "same": same}
    pusher.close()
    return found


def _die(worker: int) -> None:
    raise ConnectionAbortedError


def _refuse(worker: int) -> None:
    raise RuntimeError("the model refused pushed weights")


def _freeze(worker: int) -> None:
    THAW.wait(SHORT + 10)


THAW = threading.Event()  # the server is no longer waited for
FAULTS = {"dies": _die, "refuses": _refuse, "freezes": _freeze}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {case["name"]: run_case(case) for case in job["cases"]}
    found["faults"] = run_faults(job["faults"])
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
