"""The plan of a run in numbers, and one line per trainer rank."""

from collections.abc import Iterator
from pathlib import Path

from dapo_megatron.config.fleet import FleetConfig
from dapo_megatron.config.reference_view import reference_config
from dapo_megatron.config.run import Config
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.planning.ranks import RankPlace, parameters_held, rank_places


def plan(config: Config, num_ranks: int, nodes: int = 1) -> dict[str, str]:
    """What a run of `num_ranks` ranks on `nodes` nodes will do, in numbers."""
    rollout = config.rollout
    responses = config.responses_per_step
    updates = responses // config.training.mini_batch
    budget = "no limit" if rollout.prompt_budget is None else f"at most {rollout.prompt_budget}"
    sequence = config.longest_sequence
    return {
        "ranks": f"{num_ranks} = {layout(config.parallel, num_ranks)}, on {nodes} {'node' if nodes == 1 else 'nodes'}",
        **({"reference policy": reference(config, num_ranks)} if config.algorithm.has_reference else {}),
        "rollout servers": answers_from(config, num_ranks),
        "responses per step": f"{responses} = {rollout.prompts_per_step} groups x {rollout.samples_per_prompt} answers",
        "prompts drawn per step": f"{rollout.prompts_per_step}, dynamic sampling {budget}"
        if rollout.dynamic_sampling
        else f"{rollout.prompts_per_step}, no dynamic sampling",
        "updates per step": f"{updates} mini-batches of {config.training.mini_batch} responses",
        "updates in all": f"{updates * config.run.steps} in {config.run.steps} steps",
        "longest sequence": f"{sequence} tokens; {config.training.micro_batch_tokens // sequence} of them fill "
        "a micro-batch",
        "run folder": config.run.dir,
    }


def layout(parallel: ParallelConfig, num_ranks: int) -> str:
    """The sizes along the axes of a layout, in words."""
    data = num_ranks // parallel.model_ranks
    return f"tensor {parallel.tensor} x context {parallel.context} x data {data} x pipeline {parallel.pipeline}"


def reference(config: Config, num_ranks: int) -> str:
    """Which model the frozen reference policy is, and how it is spread over the same ranks, in words."""
    own = reference_config(config)
    return f"{own.model.path}, {layout(own.parallel, num_ranks)}, {own.training.precision}"


def answers_from(config: Config, num_ranks: int) -> str:
    """Servers that generate answers, or what is there in their place, in words."""
    if config.has_servers:
        return servers(config.fleet, num_ranks)
    replay = config.rollout.replay
    return "none: data.train holds pairs of answers" if replay is None else f"none: batches are replayed from {replay}"


def servers(fleet: FleetConfig, num_ranks: int) -> str:
    """Where answers come from, in words."""
    kind = f"tensor {fleet.tensor}, {fleet.dtype}"
    if fleet.mode == "managed":
        return f"{fleet.servers} x {kind}, started by the run"
    if fleet.mode == "colocated":
        return f"{num_ranks // fleet.world_size} x {kind}, on the trainers' GPUs in turns"
    if fleet.urls:
        return f"{len(fleet.urls)} x {kind}, at {', '.join(fleet.urls)}"
    path = Path(str(fleet.urls_file))
    count = f"{len(path.read_text().split())} x " if path.is_file() else ""
    return f"{count}{kind}, at the addresses in {path}"


def rank_lines(config: Config, arch: Architecture, num_ranks: int, ranks_per_node: int) -> Iterator[str]:
    """A heading, then for every rank its place, its layers and its parameters; columns line up."""
    yield "rank node    tp   cp   dp   pp   ep  parameters  layers"
    for place in rank_places(config.parallel, num_ranks, arch.num_layers):
        numbers = (place.tensor, place.context, place.data, place.pipeline, place.expert)
        held = parameters_held(arch, config.parallel, place)
        columns = " ".join(f"{number:4d}" for number in numbers)
        yield f"{place.rank:4d} {place.rank // ranks_per_node:4d}  {columns}  {held:,d}  {_layers(place)}"


def _layers(place: RankPlace) -> str:
    """0-3 8-11: the first and the last layer of each chunk."""
    return " ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in place.layers)
