"""The command line. It checks everything it can and then becomes torchrun; it loads no torch itself."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, get_args

from dapo_megatron import __version__
from dapo_megatron.checkpoint import quantize_command
from dapo_megatron.checkpoint.commands import add_commands
from dapo_megatron.config.algorithm import AlgorithmConfig
from dapo_megatron.config.load import load_config
from dapo_megatron.config.run import Config
from dapo_megatron.config.training import TrainingConfig
from dapo_megatron.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130

ECHO_SECONDS = 10.0  # a process under torchrun says what is wrong so much later than the first of its machine


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a user error (one sentence on stderr), 130 for Ctrl-C.

    `train` does not return when it starts the run: the process becomes the launcher.
    """
    options = _parse(arguments)
    try:
        code: int = options.command(options)
    except UserError as error:
        if int(os.environ.get("LOCAL_RANK", 0)):
            time.sleep(ECHO_SECONDS)  # torchrun ends this process as soon as the first has said the same and exited
        print(f"dapo-megatron: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse itself refuses KEY=VALUE after an option; here options may stand anywhere."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    takes_overrides = hasattr(options, "overrides")
    if unknown := [argument for argument in more if argument.startswith("-") or not takes_overrides]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides:
        options.overrides += more
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo-megatron", description="Reinforcement learning with DAPO.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_plan(commands)
    _add_serve(commands)
    _add_fleet(commands)
    _add_verify(commands)
    add_commands(commands)
    quantize_command.add_command(commands)
    return parser


def _command(commands: Commands, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """A command that reads a configuration."""
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument("config", help="YAML file, see docs/configuration.md")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replaces a value, for example run.steps=20")
    return parser


def _add_train(commands: Commands) -> None:
    train = _command(commands, "train", "train a model", "Check a run, then start it under torchrun on this machine.")
    train.set_defaults(command=_train)
    train.add_argument("--nproc", type=_positive, default=1, metavar="N", help="trainer ranks on each node (default 1)")
    train.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, start nothing")
    train.add_argument(
        "--nnodes", type=_positive, default=1, metavar="N", help="with --dry-run: nodes (launch/train.sh starts them)"
    )
    _add_hf_config(train, "with --dry-run, where")


def _add_plan(commands: Commands) -> None:
    parser = _command(
        commands,
        "plan",
        "print what a run would do",
        "Check a run and print its plan, as `train --dry-run`, or how weights would travel to its servers; start "
        "nothing.",
    )
    parser.set_defaults(command=_plan)
    parser.add_argument("--sync", action="store_true", help="which bytes go from which rank to which server's worker")
    parser.add_argument(
        "--nproc", type=_positive, default=1, metavar="N", help="trainer ranks on each node (default 1)"
    )
    parser.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="nodes (default 1)")
    _add_hf_config(parser, "where")


def _add_hf_config(parser: argparse.ArgumentParser, when: str) -> None:
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="FILE",
        help=f"{when} model.path is not on this machine: config.json with the model's dimensions (default: the one "
        "beside CONFIG)",
    )


def _add_serve(commands: Commands) -> None:
    serve = _command(
        commands, "serve", "start one vLLM server", "Start one vLLM server for RL and print its URL when it is healthy."
    )
    serve.set_defaults(command=_serve)
    serve.add_argument(
        "--index", type=_number, default=0, metavar="I", help="number in the fleet: its seed and its log"
    )
    serve.add_argument("--host", help="address to listen on, in place of fleet.host")
    serve.add_argument("--port", type=_positive, help="port to listen on, in place of fleet.port + I")
    serve.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token (default: the variable fleet.token_env)"
    )


def _add_fleet(commands: Commands) -> None:
    fleet = commands.add_parser(
        "fleet",
        help="show what servers do",
        description="Ask vLLM servers what they are and what they do. Exit code 1 if one is not healthy.",
    )
    fleet.set_defaults(command=_fleet)
    fleet.add_argument("urls", nargs="*", metavar="URL", help="such as http://10.0.0.7:8000")
    fleet.add_argument("--config", metavar="CONFIG", help="the servers that its `fleet` section names, instead of URLs")
    fleet.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token (default: the variable fleet.token_env)"
    )


def _add_verify(commands: Commands) -> None:
    verify = commands.add_parser("verify", help="check the numbers of a layout on this machine")
    checks = verify.add_subparsers(required=True, metavar="CHECK")
    layout = checks.add_parser(
        "layout",
        help="loss and gradients of a layout against the simplest one",
        description="Compute loss and main gradients of a few random responses in a parallel layout, and in the "
        "simplest layout that fits in memory, and compare them. Exit code 0: equal, 1: not, 2: the layout is refused.",
    )
    layout.set_defaults(command=_verify_layout)
    layout.add_argument("--model", required=True, metavar="DIR", help="Hugging Face checkpoint")
    sizes = layout.add_argument_group("layout (sizes; default 1)")
    for option, name in (("tp", "tensor"), ("pp", "pipeline"), ("vpp", "virtual pipeline"), ("cp", "context"),
                         ("ep", "expert"), ("etp", "expert tensor")):  # fmt: skip
        sizes.add_argument(f"--{option}", type=_positive, default=1, metavar="N", help=f"{name} parallel")
    sizes.add_argument("--dp", type=_positive, metavar="N", help="data parallel (default: the least that works)")
    sizes.add_argument("--sp", action="store_true", help="sequence parallel")
    run = layout.add_argument_group("what else may not change the numbers")
    run.add_argument("--micro-batch-tokens", type=_positive, metavar="N", help="default: a few sequences")
    run.add_argument("--recompute", choices=_choices(TrainingConfig, "recompute"), default="none")
    check = layout.add_argument_group("objective, arithmetic and verdict")
    check.add_argument("--loss", choices=_choices(AlgorithmConfig, "loss"), default="ppo_clip")
    check.add_argument("--aggregation", choices=_choices(AlgorithmConfig, "aggregation"), default="token_mean")
    check.add_argument(
        "--precision",
        choices=("fp64", "fp32", "bf16"),
        default="fp64",
        help="fp64 (default) leaves only errors of the layout, in layers without Transformer Engine, which has no "
        "fp64; the others use the layers of a run, and add rounding",
    )
    check.add_argument(
        "--tolerance", type=float, default=1e-5, metavar="X", help="of ||g - g_ref|| / ||g_ref|| (default 1e-5)"
    )


def _choices(section: Any, field: str) -> tuple[str, ...]:
    """What a field of the configuration may be."""
    return get_args(section.model_fields[field].annotation)


def _train(options: argparse.Namespace) -> int:
    from dapo_megatron.config.preflight import preflight  # loads what `serve` has no need of

    config = load_config(options.config, options.overrides)
    if not options.dry_run:
        if options.nnodes > 1 or options.hf_config is not None:
            raise UserError("--nnodes and --hf-config are for --dry-run; launch/train.sh starts a run of many nodes")
        preflight(config, options.nproc)
        _become_launcher(config, options)
    _dry_run(config, options)
    return 0


def _plan(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    if not options.sync:
        _dry_run(config, options)
        return 0
    from dapo_megatron.planning.sync import print_sync

    print_sync(config, options.nproc * options.nnodes, _hf_config(options))
    return 0


def _dry_run(config: Config, options: argparse.Namespace) -> None:
    from dapo_megatron.planning.dry_run import dry_run

    dry_run(config, options.nproc, options.nnodes, _hf_config(options))


def _hf_config(options: argparse.Namespace) -> Path | None:
    """The config.json that was named, or that lies beside CONFIG."""
    beside = Path(options.config).with_name("config.json")
    named: Path | None = options.hf_config
    return named or (beside if beside.is_file() else None)


def _serve(options: argparse.Namespace) -> int:
    from dapo_megatron.serve import read_token, serve

    config = load_config(options.config, options.overrides)
    if options.host is not None:
        config.fleet.host = options.host
    return serve(config, options.index, read_token(options.token_file, config.fleet.token_env), options.port)


def _fleet(options: argparse.Namespace) -> int:
    from dapo_megatron.rollout.fleet_table import show_fleet

    return show_fleet(options)


def _verify_layout(options: argparse.Namespace) -> int:
    from dapo_megatron.verify import verify_layout

    return verify_layout(options)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _number(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
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


if __name__ == "__main__":
    sys.exit(main())
