"""The command line. It checks everything it can and then becomes torchrun; it loads no torch itself."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import yaml
from rich.console import Console
from rich.table import Table

from dapo_megatron import __version__
from dapo_megatron.config.load import load_config
from dapo_megatron.config.preflight import preflight
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a user error (one sentence on stderr), 130 for Ctrl-C.

    `train` does not return when it starts the run: the process becomes the launcher.
    """
    options = _parse(arguments)
    try:
        config = load_config(options.config, options.overrides)
        preflight(config, options.nproc)
        if options.dry_run:
            _print_plan(config, options.nproc)
            return 0
        _become_launcher(config, options)
    except UserError as error:
        print(f"dapo-megatron: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse itself refuses KEY=VALUE after an option; here options may stand anywhere."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    if unknown := [argument for argument in more if argument.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += more
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo-megatron", description="Reinforcement learning with DAPO.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a model", description="Check a run, then start it under torchrun.")
    train.add_argument("config", help="YAML file, see docs/configuration.md")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replaces a value, for example run.steps=20")
    train.add_argument(
        "--nproc", type=_positive, default=1, metavar="N", help="trainer ranks on this machine (default 1)"
    )
    train.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, start nothing")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _become_launcher(config: Config, options: argparse.Namespace) -> NoReturn:
    """Replace this process, so that signals and the exit code are the launcher's own."""
    command = [sys.executable, "-m", "dapo_megatron.launcher", "--standalone", f"--nproc-per-node={options.nproc}"]
    command += ["-m", "dapo_megatron.train", options.config, *options.overrides]
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(config, options.nproc)))
    # Threads that wait by spinning slow a busy machine down by a factor of ten: servers and ranks share the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _threads(config: Config, num_ranks: int) -> int:
    """CPU threads per rank: as configured, or an equal share of the cores."""
    return config.training.threads or max(1, (os.cpu_count() or 1) // num_ranks)


def _print_plan(config: Config, num_ranks: int) -> None:
    console = Console()
    resolved = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    console.print(resolved, markup=False, soft_wrap=True)
    table = Table(title="plan", show_header=False)
    for name, value in plan(config, num_ranks).items():
        table.add_row(name, value)
    console.print(table)


def plan(config: Config, num_ranks: int) -> dict[str, str]:
    """What a run of `num_ranks` ranks will do, in numbers."""
    rollout, parallel = config.rollout, config.parallel
    data_parallel = num_ranks // (parallel.tensor * parallel.pipeline)
    responses = config.responses_per_step
    updates = responses // config.training.mini_batch
    budget = "no limit" if rollout.prompt_budget is None else f"at most {rollout.prompt_budget}"
    sequence = config.data.max_prompt_tokens + rollout.max_tokens
    return {
        "ranks": f"{num_ranks} = tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {data_parallel}",
        "rollout servers": f"{config.fleet.servers} x tensor {config.fleet.tensor}, {config.fleet.dtype}"
        if rollout.replay is None
        else f"none: batches are replayed from {rollout.replay}",
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


if __name__ == "__main__":
    sys.exit(main())
