"""The command `quantize`. Loads torch when it runs."""

import argparse
from pathlib import Path

from dapo_megatron.checkpoint.commands import any_checkpoint, new_folder
from dapo_megatron.checkpoint.quantize_formats import FORMATS
from dapo_megatron.errors import UserError, renamed_keys


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add it to the command line."""
    quantize = commands.add_parser(
        "quantize",
        help="FP8 or NVFP4 for vLLM",
        description="Quantise a Hugging Face folder, a Megatron checkpoint or the newest state of a run with "
        "nvidia-modelopt, and report every layer and the difference of log-probs.",
    )
    quantize.add_argument("--model", type=Path, required=True, metavar="DIR", help="a checkpoint in any form")
    quantize.add_argument(
        "--out", type=new_folder, required=True, metavar="DIR", help="new Hugging Face folder for vLLM"
    )
    quantize.add_argument("--format", choices=FORMATS, default="fp8", help="default fp8")
    quantize.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help=".txt, .jsonl, .json or .parquet to calibrate with"
    )
    quantize.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATH",
        help="layer to leave as it is: its whole path; * stands for one component, ** for any number. May be repeated",
    )
    numbers = (("calibration-prompts", 256, "prompts to calibrate with, at most"),
               ("max-prompt-tokens", 512, "longer prompts are cut"),
               ("probe-tokens", 2048, "held-out tokens whose log-probs are compared, about"))  # fmt: skip
    for option, default, meaning in numbers:
        quantize.add_argument(f"--{option}", type=int, default=default, metavar="N", help=f"{meaning} ({default})")
    quantize.set_defaults(command=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dapo_megatron.checkpoint.quantize import QuantizeOptions, quantize
    from dapo_megatron.checkpoint.quantize_report import print_report

    for name in ("calibration_prompts", "max_prompt_tokens", "probe_tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    with renamed_keys({"--checkpoint": "--model"}):
        model = any_checkpoint(options.model)
    report = quantize(
        QuantizeOptions(
            model,
            options.out,
            options.format,
            options.prompts,
            tuple(options.keep),
            options.calibration_prompts,
            options.max_prompt_tokens,
            options.probe_tokens,
        )
    )
    print_report(report, Console())
    return 0
