"""`dapo-megatron plan CONFIG --sync`: how weights travel from the trainer to the servers, in tables."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from dapo_megatron.config.run import Config
from dapo_megatron.planning.dry_run import check
from dapo_megatron.sync.plan import TransferPlan
from dapo_megatron.sync.proof import proved_plan
from dapo_megatron.sync.same_host_plan import same_host_plan
from dapo_megatron.sync.wire import Bucket

MIB = 1 << 20


def print_sync(config: Config, num_ranks: int, hf_config: Path | None) -> None:
    """Check a run of `num_ranks` trainer ranks and print the plan of its pushes.

    `hf_config` is a config.json with the model's dimensions, for a model that is not on this machine.

    Raises:
        UserError: for the first check that fails.
    """
    arch, _ = check(config, num_ranks, hf_config)
    plan = proved_plan(config, arch, num_ranks)
    if config.fleet.mode == "colocated":
        plan = same_host_plan(plan, range(num_ranks // plan.server.workers))
    console = Console()
    console.print(senders_table(plan))
    console.print(workers_table(plan.of_server(0)))
    console.print(
        f"{plan.num_tensors} tensors, {len(plan.buckets)} broadcasts in {len(plan.groups)} groups; every worker gets "
        "all that it holds, each byte once: proved",
        highlight=False,
    )


def senders_table(plan: TransferPlan) -> Table:
    """One row per trainer rank that sends: what leaves it."""
    table = Table("rank", "sends MiB", "tensors", "groups", "largest bucket MiB", title="trainer ranks that send")
    for rank in plan.senders:
        buckets = [bucket for bucket in plan.buckets if bucket.group.sender == rank]
        groups = {bucket.group for bucket in buckets}
        table.add_row(str(rank), _mib(buckets), _tensors(buckets), str(len(groups)), _largest(buckets))
    return table


def workers_table(plan: TransferPlan) -> Table:
    """One row per worker of a server, of which all are alike: what reaches it."""
    title = "workers of each server"
    table = Table("worker", "stage", "tensor rank", "gets MiB", "tensors", "largest bucket MiB", title=title)
    for worker in range(plan.server.workers):
        stage, rank = divmod(worker, plan.server.tensor)
        buckets = list(plan.received(worker))
        table.add_row(str(worker), str(stage), str(rank), _mib(buckets), _tensors(buckets), _largest(buckets))
    return table


def _mib(buckets: list[Bucket]) -> str:
    return f"{sum(bucket.nbytes for bucket in buckets) / MIB:,.1f}"


def _largest(buckets: list[Bucket]) -> str:
    return f"{max((bucket.nbytes for bucket in buckets), default=0) / MIB:,.1f}"


def _tensors(buckets: list[Bucket]) -> str:
    return str(len({stretch.name for bucket in buckets for stretch in bucket.stretches}))
