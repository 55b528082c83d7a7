"""`dapo-megatron train --dry-run`: everything about a run that can be told and checked without starting it."""

from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from dapo_megatron.config.preflight import check_critic, check_machine, check_model, check_plan, check_reference
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.planning.plan import plan, rank_lines


def dry_run(config: Config, ranks_per_node: int, nodes: int, hf_config: Path | None) -> None:
    """Check a run and print its configuration, its plan, the place of every rank, and what was not checked.

    `hf_config` is a config.json with the model's dimensions, for a model that is not on this machine.

    Raises:
        UserError: for the first check that fails.
    """
    num_ranks = ranks_per_node * nodes
    architecture, unchecked = check(config, num_ranks, hf_config)
    console = Console()
    resolved = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    console.print(resolved, markup=False, soft_wrap=True)
    table = Table(title="plan", show_header=False)
    for name, value in plan(config, num_ranks, nodes).items():
        table.add_row(name, value)
    console.print(table)
    for line in rank_lines(config, architecture, num_ranks, ranks_per_node):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in config.notes:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in unchecked:
        console.print(f"not checked: {line}", markup=False, highlight=False, soft_wrap=True)


def check(config: Config, num_ranks: int, hf_config: Path | None) -> tuple[Architecture, list[str]]:
    """The model's dimensions, and what could not be checked here. Raises UserError for the first check that fails."""
    unchecked: list[str] = []
    folder = Path(config.model.path)
    if folder.is_dir():
        architecture = check_model(folder)
        check_plan(config, num_ranks, architecture)
        check_reference(config, num_ranks, architecture)
        check_critic(config, num_ranks, architecture)
        check_machine(config, num_ranks)
        return architecture, unchecked
    if hf_config is None:
        raise UserError(
            f"model.path: the folder {folder} does not exist; to plan without it, give --hf-config with the model's "
            "config.json"
        )
    if hf_config.name != "config.json" or not hf_config.is_file():
        raise UserError(f"--hf-config must be a file config.json, not {hf_config}")
    architecture = architecture_of(hf_config.parent)
    check_plan(config, num_ranks, architecture)
    if config.reference.path is None or Path(config.reference.path).is_dir():
        check_reference(config, num_ranks, architecture)
    elif config.algorithm.has_reference:
        unchecked.append(f"{config.reference.path} is not on this machine: the reference policy")
    if config.critic.path is None or Path(config.critic.path).is_dir():
        check_critic(config, num_ranks, architecture)
    elif config.algorithm.has_critic:
        unchecked.append(f"{config.critic.path} is not on this machine: the critic")
    unchecked.append(f"{folder} is not on this machine (dimensions are those of {hf_config}): weights and tokenizer")
    unchecked.append("what the machines of the run must have: data, run folder, trackers, vLLM and free ports")
    return architecture, unchecked
