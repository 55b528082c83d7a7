"""`dapo-megatron verify layout`: does a parallel layout give the numbers of the simplest one, on this machine?

Everything up to the start of the ranks runs without torch, except the question what devices there are.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from dapo_megatron.config.precision import packed_alignment, sequence_alignment
from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.run import Config
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.layout import check_layout, check_ranks
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.planning.ranks import parameters_held, rank_places

WORKER = "dapo_megatron.trainer.verify_layout"
GROUPS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 24, 12  # the batch: at least so many groups
MICRO_BATCH_TOKENS = 96  # a few sequences: several micro-batches on each rank
WHOLE_BATCH = 65536  # micro-batch of the reference
LOG_PROB_CHUNK = 64
# Clipping that fits the loss, where the defaults do not. log r of a response has about 0.25 / sqrt(its tokens) of
# standard deviation: bounds that clip some, not all.
CLIP: dict[str, dict[str, float | None]] = {"gspo": {"low": 0.05, "high": 0.07}, "cispo": {"dual": None}}
# fp64 weights 8, main gradient 4, the optimizer's buffer 4, the checkpoint's mapped file 4; there is no update, and so
# no Adam states. The rest is libraries, activations and logits of a few hundred tokens. SmolLM2-135M took 4.5 GB.
BYTES_PER_PARAMETER = 20
RANK_BYTES = 1_800_000_000
LAYOUT_NAMES = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP",
                "expert_tensor": "ETP"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One side of the comparison: a configuration and the ranks it runs on."""

    config: Config
    ranks: int

    @property
    def name(self) -> str:
        """TP2 PP2: the sizes above 1."""
        parallel = self.config.parallel
        sizes = {short: getattr(parallel, key) for key, short in LAYOUT_NAMES.items()}
        sizes["DP"] = self.ranks // parallel.model_ranks
        names = [f"{short}{size}" for short, size in sizes.items() if size > 1] + ["SP"] * parallel.sequence
        return " ".join(names) or "1 rank"


@dataclass(frozen=True)
class Machine:
    """What ranks can run on. Without GPUs all ranks share one memory, and their number is not limited."""

    gpus: int
    memory: int  # bytes, of each GPU or of the machine

    @classmethod
    def here(cls) -> "Machine":
        """This machine. Loads torch, which alone knows whether ranks will use GPUs."""
        from dapo_megatron.trainer.device import gpu_memory

        gpus = gpu_memory()
        return cls(len(gpus), min(gpus, default=psutil.virtual_memory().available))

    def fits(self, architecture: Architecture, parallel: ParallelConfig, ranks: int) -> bool:
        """Whether the ranks of a layout have enough memory and devices."""
        return self.needed(architecture, parallel, ranks) <= self.memory and (not self.gpus or ranks <= self.gpus)

    def needed(self, architecture: Architecture, parallel: ParallelConfig, ranks: int) -> int:
        """Bytes that `memory` must have."""
        places = rank_places(parallel, ranks, architecture.num_layers)
        held = [BYTES_PER_PARAMETER * parameters_held(architecture, parallel, p) + RANK_BYTES for p in places]
        return max(held) if self.gpus else sum(held)


def verify_layout(options: argparse.Namespace) -> int:
    """Run both layouts, print the table; 0 where they agree, 1 where not, a failed rank's code otherwise.

    Raises:
        UserError: if the layout cannot be, or does not fit this machine; no process has started then.
    """
    architecture = architecture_of(options.model)
    case = layout_case(options, architecture)
    machine = Machine.here()
    check_machine(machine, architecture, case)
    reference = Case(*choose_reference(machine, architecture, case.config))
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `with` and `run` clean up
    with tempfile.TemporaryDirectory(prefix="dapo-verify-") as folder:
        results = []
        for side, role in ((reference, "reference"), (case, "layout")):
            with console.status(f"{role}: {side.name}"):
                code = run_ranks(side, Path(folder), role, fp64=options.precision == "fp64")
            if code:
                return code
            results.append(json.loads((Path(folder) / f"{role}.json").read_text()))
    verdict = judge(results[0], results[1], options.tolerance)
    console.print(table(reference, case, verdict))
    console.print(verdict.sentence(options.tolerance), highlight=False, soft_wrap=True)
    return 0 if verdict.passed else 1


def layout_case(options: argparse.Namespace, architecture: Architecture) -> Case:
    """The layout that the options describe, checked against the rules for layouts and for the model.

    Raises:
        UserError: naming the rule.
    """
    parallel = ParallelConfig(
        tensor=options.tp,
        sequence=options.sp,
        pipeline=options.pp,
        virtual_pipeline=options.vpp,
        context=options.cp,
        expert=options.ep,
        expert_tensor=options.etp,
    )
    model = Path(options.model).name
    check_layout(architecture, parallel, model)
    if options.dp is None:
        ranks = math.lcm(parallel.model_ranks, parallel.pipeline * parallel.expert * parallel.expert_tensor)
    else:
        ranks = options.dp * parallel.model_ranks
        check_ranks(parallel, ranks, f"--dp {options.dp}: the number of ranks")
    try:
        config = layout_config(options, parallel, max(GROUPS, ranks // parallel.model_ranks))
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    check_precision(architecture, config.training, config.optimizer, parallel, model=model)
    return Case(config, ranks)


def layout_config(options: argparse.Namespace, parallel: ParallelConfig, groups: int) -> Config:
    """The configuration of a batch of `groups` groups in a layout."""
    exact = options.precision == "fp64"
    training = TrainingConfig(
        mini_batch=groups * SAMPLES,
        precision="fp32" if exact else options.precision,
        layer_backend="local" if exact else "auto",
        recompute=options.recompute,
        log_prob_chunk=LOG_PROB_CHUNK,
    )
    if options.micro_batch_tokens is None:
        longest = _round_up(PROMPT_TOKENS + RESPONSE_TOKENS, sequence_alignment(training, parallel))
        training.micro_batch_tokens = _round_up(max(longest, MICRO_BATCH_TOKENS), packed_alignment(training, parallel))
    else:
        training.micro_batch_tokens = options.micro_batch_tokens
    return Config.model_validate(
        {
            "run": {"dir": "", "steps": 1},
            "model": {"path": str(options.model)},
            "data": {"train": {"arithmetic": {}}, "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "prompts_per_step": groups,
                "samples_per_prompt": SAMPLES,
                "max_tokens": RESPONSE_TOKENS,
            },
            "algorithm": {
                "loss": options.loss,
                "aggregation": options.aggregation,
                "clip": CLIP.get(options.loss, {}),
            },
            "training": training.model_dump(),
            "parallel": parallel.model_dump(),
        }
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def check_machine(machine: Machine, architecture: Architecture, case: Case) -> None:
    """Refuse a layout that this machine cannot run.

    Raises:
        UserError: naming what is there and what is needed.
    """
    if machine.gpus and case.ranks > machine.gpus:
        raise UserError(f"{case.name} needs {case.ranks} ranks, each with its GPU; this machine has {machine.gpus}")
    needed = machine.needed(architecture, case.config.parallel, case.ranks)
    if needed > machine.memory:
        where = "a GPU here has" if machine.gpus else "this machine has free"
        raise UserError(
            f"{case.name} needs about {needed / 1e9:.1f} GB, {where} {machine.memory / 1e9:.1f} GB; use "
            + ("a layout that splits the model further" if machine.gpus else "fewer ranks or a smaller model")
        )


def choose_reference(machine: Machine, architecture: Architecture, config: Config) -> tuple[Config, int]:
    """The simplest layout that fits: one rank, or else the fewest pipeline stages. With its number of ranks.

    All of the batch is one micro-batch, and nothing is computed twice.

    Raises:
        UserError: if none fits.
    """
    for stages in range(1, architecture.num_layers + 1):
        parallel = ParallelConfig(pipeline=stages)
        if architecture.num_layers % stages == 0 and machine.fits(architecture, parallel, stages):
            training = config.training.model_copy(update={"micro_batch_tokens": WHOLE_BATCH, "recompute": "none"})
            return config.model_copy(update={"parallel": parallel, "training": training}), stages
    needed = machine.needed(architecture, ParallelConfig(), 1)
    raise UserError(
        f"no reference fits: one rank needs about {needed / 1e9:.1f} GB, {machine.memory / 1e9:.1f} GB are there, and "
        "pipeline stages do not help here; use a smaller model"
    )


def run_ranks(case: Case, folder: Path, role: str, *, fp64: bool) -> int:
    """Start torchrun on this machine and wait for it. The reference leaves gradients in `folder`, both ROLE.json."""
    job = {
        "config": case.config.model_dump(),
        "fp64": fp64,
        "is_reference": role == "reference",
        "reference": str(folder / "gradients"),
        "result": str(folder / f"{role}.json"),
    }
    path = folder / f"{role}_job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "dapo_megatron.launcher", "--standalone", f"--nproc-per-node={case.ranks}"]
    threads = str(max(1, (os.cpu_count() or 1) // case.ranks))
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    return subprocess.run([*command, "-m", WORKER, str(path)], env=environment, check=False).returncode


@dataclass(frozen=True)
class Verdict:
    """Loss in the reference and in the layout, and by name ||x - x_ref|| / ||x_ref|| of what else is compared."""

    losses: tuple[float, float]
    log_probs: dict[str, float]  # by response
    gradients: dict[str, float]  # by parameter
    passed: bool

    def sentence(self, tolerance: float) -> str:
        """What was found, in words."""
        worst = max(self.gradients, key=self.gradients.__getitem__)
        if self.passed:
            return f"pass: no difference is above {tolerance:.0e}; the largest of a gradient is in {worst}"
        above = sum(error > tolerance for error in self.gradients.values())
        return f"FAIL: {above} of {len(self.gradients)} gradients differ by more than {tolerance:.0e}, most: {worst}"


def judge(reference: dict[str, Any], outcome: dict[str, Any], tolerance: float) -> Verdict:
    """Whether loss, log-probs and every gradient agree within `tolerance`, from what the ranks wrote."""
    losses = (reference["metrics"]["loss"], outcome["metrics"]["loss"])
    by_kind: dict[str, dict[str, float]] = {"log_probs": {}, "grad": {}}
    for name, error in outcome["errors"].items():
        kind, _, rest = name.partition("/")
        by_kind[kind][rest] = error
    same_loss = math.isclose(*losses, rel_tol=tolerance, abs_tol=tolerance / 100)
    passed = same_loss and max(outcome["errors"].values()) <= tolerance
    return Verdict(losses, by_kind["log_probs"], by_kind["grad"], passed)


def table(reference: Case, case: Case, verdict: Verdict) -> Table:
    """What differs, in numbers."""
    result = Table(title=Path(case.config.model.path).name, title_justify="left")
    result.add_column("")
    for heading in (f"reference: {reference.name}", case.name, "difference"):
        result.add_column(heading, justify="right")
    first, second = verdict.losses
    result.add_row("loss", f"{first:.9f}", f"{second:.9f}", f"{abs(first - second):.1e}")
    for name, errors in (("log-probs", verdict.log_probs), ("gradients", verdict.gradients)):
        result.add_row(f"{name}, worst of {len(errors)}", "", "", f"{max(errors.values()):.1e}")
    return result
