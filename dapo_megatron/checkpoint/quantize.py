"""Quantise a Hugging Face checkpoint with nvidia-modelopt, in the form that vLLM loads, and measure what it changed.

The result is read back from the disk before it gets its name: the report tells what the files hold.
"""

import contextlib
import io
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dapo_megatron.checkpoint import INDEX, SINGLE, is_megatron
from dapo_megatron.checkpoint.convert import megatron_to_hf
from dapo_megatron.checkpoint.hf import HFReader, copy_without_weights
from dapo_megatron.checkpoint.journal import make_way
from dapo_megatron.checkpoint.quantize_formats import E4M3_MAX, FORMATS, fused_group
from dapo_megatron.checkpoint.quantize_plan import (
    Plan,
    check_ignored,
    make_plan,
    modelopt_config,
    quantized_modules,
)
from dapo_megatron.checkpoint.quantize_read import LayerReport, read_back, rounded_inputs
from dapo_megatron.checkpoint.quantize_report import QuantizeReport, compare, next_token_log_probs
from dapo_megatron.checkpoint.weights import open_weights
from dapo_megatron.data.prompts import content_of, load_table
from dapo_megatron.data.rows import Content
from dapo_megatron.data.tokenizer import Tokenizer
from dapo_megatron.errors import UserError, renamed_keys
from dapo_megatron.files import fsync
from dapo_megatron.trainer.device import current_device, import_megatron

REPORT = "report.json"
QUANTIZATION = "hf_quant_config.json"
COLUMNS = ("prompt", "text", "messages")
PROBE_EVERY = 5  # one prompt in five is held out
EXTRA = "model-extra.safetensors"  # tensors that transformers does not load

ExportedPath = Callable[[str], str]
"""From the path of a module in transformers' model to its path in the files."""


@dataclass(frozen=True)
class QuantizeOptions:
    """What to quantise and how.

    Attributes:
        model: Hugging Face or Megatron checkpoint; it is only read.
        out: folder of the result; it must not exist, or be empty.
        format: a key of `FORMATS`.
        prompts: .txt with one prompt a line; or .jsonl, .json or .parquet with a column `prompt`, `text` or
            `messages` of texts or chat messages.
        keep: paths of layers to keep in their precision, `*` for one component and `**` for any number.
        calibration_prompts: at most so many are run to find the scales of inputs.
        max_prompt_tokens: longer prompts are cut.
        probe_tokens: log-probs of about so many held-out tokens are compared; each takes 4 bytes per entry of the
            vocabulary.
    """

    model: Path
    out: Path
    format: str
    prompts: Path
    keep: tuple[str, ...] = ()
    calibration_prompts: int = 256
    max_prompt_tokens: int = 512
    probe_tokens: int = 2048


def quantize(options: QuantizeOptions) -> QuantizeReport:
    """Quantise, export, read back, compare; `out` appears complete or not at all.

    Raises:
        UserError: before any work where an option cannot be used, modelopt is not installed, the model has no
            tokenizer, is quantised already or has layers that cannot be; afterwards where the disk is full or the
            files read back are not what they should be.
    """
    _check_options(options)
    with _quiet():
        _check_modelopt()
        plan, config, exported_path = _prepare(options)
    probe, calibration = split_prompts(_encode(options), options)
    if not plan.format.static_inputs:
        calibration = []
    with _beside(options.out) as folder:
        source = _as_hf(options.model, folder / "original")
        with _quiet(), renamed_keys({str(source): str(options.model), "model.path: ": ""}):
            work = _Work(source, plan, config, exported_path, probe, calibration)
            report = _quantize_into(folder / "quantised", options, work)
        with _writing(options.out):
            (folder / "quantised" / REPORT).write_text(report.to_json())
            for file in (*(folder / "quantised").iterdir(), folder / "quantised"):
                fsync(file)
            (folder / "quantised").rename(options.out)
            fsync(options.out.parent)
    return report


def split_prompts(prompts: Sequence[list[int]], options: QuantizeOptions) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts held out for the comparison, and those to calibrate with; none is in both.

    Raises:
        UserError: if there are less than two different prompts of at least two tokens.
    """
    cut = (tuple(prompt[: options.max_prompt_tokens]) for prompt in prompts)
    usable = [list(prompt) for prompt in dict.fromkeys(cut) if len(prompt) > 1]
    if len(usable) < 2:
        raise UserError(
            f"{options.prompts} has {len(usable)} different prompts of two tokens or more: at least two are needed, "
            "one to calibrate with and one to compare log-probs"
        )
    probe: list[list[int]] = []
    for prompt in usable[::PROBE_EVERY]:
        if sum(map(len, probe)) < options.probe_tokens:
            probe.append(prompt)
    calibration = [prompt for i, prompt in enumerate(usable) if i % PROBE_EVERY]
    return probe, calibration[: options.calibration_prompts]


def read_prompts(path: Path) -> list[Content]:
    """Prompts of a file, as texts or chat messages.

    Raises:
        UserError: if it is missing or empty or a row has none.
    """
    if path.suffix == ".txt":
        if not path.is_file():
            raise UserError(f"the prompts {path} do not exist")
        found: list[Content] = [line for line in path.read_text().splitlines() if line.strip()]
    else:
        rows = enumerate(load_table(str(path), "train", COLUMNS), start=1)
        found = [content_of(next(iter(row.values())), f"row {i} of {path}") for i, row in rows]
    if not found:
        raise UserError(f"{path} has no prompts: calibration needs some")
    return found


def _check_options(options: QuantizeOptions) -> None:
    if options.format not in FORMATS:
        raise UserError(f"--format {options.format}: choose {', '.join(FORMATS)}")
    for name in ("calibration_prompts", "max_prompt_tokens", "probe_tokens"):
        if getattr(options, name) < (least := 2 if name == "max_prompt_tokens" else 1):
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}")
    if not (options.model / "config.json").is_file():
        raise UserError(f"{options.model} is no checkpoint: it has no config.json")
    try:
        quantization = json.loads((options.model / "config.json").read_text()).get("quantization_config")
    except ValueError as error:
        raise UserError(f"{options.model / 'config.json'} is not valid JSON: {error}") from error
    if quantization or (options.model / QUANTIZATION).exists():
        raise UserError(f"{options.model} is quantised already: give the checkpoint that it was made of")
    make_way(options.out)


def _check_modelopt() -> None:
    import_megatron()  # modelopt imports megatron-core; without CUDA it has to be ours that does so first
    try:
        import modelopt.torch.quantization  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"nvidia-modelopt is not installed ({error}): pip install 'dapo-megatron[quantize]', or "
            "pip install nvidia-modelopt"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """modelopt and transformers print what they do and warn of versions; the report says what was done."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    modelopt = logging.getLogger("modelopt")
    level = modelopt.level
    modelopt.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        modelopt.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from error


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new folder on the same disk, which goes afterwards with what is still in it."""
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=f"{out.name}.", suffix=".incomplete", dir=out.parent)
    with folder as name:
        yield Path(name)


def _as_hf(model: Path, target: Path) -> Path:
    """The model as a Hugging Face folder: itself, or an export."""
    return megatron_to_hf(model, target).folder if is_megatron(model) else model


def _prepare(options: QuantizeOptions) -> tuple[Plan, dict[str, Any], ExportedPath]:
    """What will be done, found out on a model without weights."""
    from modelopt.torch.export.quant_aware_conversion import QuantConversionUnsupportedError, build_reverse_name_mapper

    model = _blank_model(options.model)
    plan = make_plan(model, FORMATS[options.format], options.keep)
    try:
        exported_path: ExportedPath = build_reverse_name_mapper(model) or str
    except QuantConversionUnsupportedError as error:
        raise UserError(f"{options.model}: modelopt cannot export a {type(model).__name__}: {error}") from error
    config = modelopt_config(model, plan)
    with renamed_keys({"model.path: ": ""}):
        names = set(open_weights(options.model).names())
    for path in map(exported_path, (matrix for layer in plan.layers for matrix in layer.matrices)):
        if f"{path}.weight" not in names:
            raise UserError(
                f"modelopt would write {path}.weight, which {options.model} does not have: it is incomplete, or stores "
                "its layers in a form that modelopt does not write"
            )
    return plan, config, exported_path


def _blank_model(folder: Path) -> PreTrainedModel:
    """The model without weights, on the meta device."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UserError(f"transformers cannot load {folder}: {str(error).strip().splitlines()[0]}") from error
    return model


def _encode(options: QuantizeOptions) -> list[list[int]]:
    with renamed_keys({"model.path: ": ""}):
        return Tokenizer(options.model).encode_prompts(read_prompts(options.prompts))


@dataclass(frozen=True)
class _Work:
    """What is to be done: with which Hugging Face folder, the plan, modelopt's configuration for it, the prompts to
    compare and to calibrate with.
    """

    source: Path
    plan: Plan
    config: dict[str, Any]
    exported_path: ExportedPath
    probe: list[list[int]]
    calibration: list[list[int]]

    @property
    def kept(self) -> dict[str, str]:
        """Why modules are kept, by their paths in the files."""
        return {self.exported_path(path): reason for path, reason in self.plan.kept.items()}


def _quantize_into(folder: Path, options: QuantizeOptions, work: _Work) -> QuantizeReport:
    """Write the quantised checkpoint to `folder`, read it back and tell what it is."""
    from modelopt.torch.export import export_hf_checkpoint

    clock = _Clock()
    original = HFReader(work.source)
    model = _load(work.source)
    clock.stop("load")
    before = list(next_token_log_probs(model, work.probe))
    if not all(log_probs.isfinite().all() for log_probs in before):
        raise UserError(f"{options.model}: its log-probs are not finite; does it hold NaN or infinite weights?")
    clock.stop("log-probs before")
    model = _calibrated(model, work)
    clock.stop("calibrate")
    with _writing(options.out):
        folder.mkdir()
        export_hf_checkpoint(model, export_dir=folder)
        del model
        copy_without_weights(options.model, folder, but=("config.json", REPORT))
        _add_missing(folder, original)
    clock.stop("export")
    exported = HFReader(folder)
    result = read_back(exported, original, work.plan.format, partial(_reason, work.kept))
    with _writing(options.out):
        _write_ignored(folder, result.layers, work.kept)
    model = _load(work.source, result.weights)
    with rounded_inputs(model, work.plan, result.layers, work.exported_path):
        comparison = compare(work.probe, before, next_token_log_probs(model, work.probe))
    clock.stop("read back and compare")
    return QuantizeReport(
        model=str(options.model),
        out=str(options.out),
        format=options.format,
        algorithm=work.plan.format.algorithm,
        modelopt=version("nvidia-modelopt"),
        calibration_prompts=len(work.calibration),
        calibration_tokens=sum(map(len, work.calibration)),
        bytes_before=_total_bytes(original),
        bytes_after=_total_bytes(exported),
        layers=(*result.layers, *_tied(work.kept, result.layers)),
        probe=comparison,
        seconds=clock.seconds,
    )


def _load(folder: Path, weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """The model of a folder, with other weights of the same names and dtypes if they are given."""
    config = AutoConfig.from_pretrained(folder)
    model, found = type(_blank_model(folder)).from_pretrained(
        folder if weights is None else None,
        config=config,
        state_dict=weights,
        dtype=config.dtype or "auto",
        # Experts can be calibrated and their inputs rounded only where each is a linear function of its own.
        experts_implementation="eager",
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"{folder} lacks {missing[0]} and {len(missing) - 1} other tensors of the model")
    return model.eval().to(current_device())


def _calibrated(model: nn.Module, work: _Work) -> nn.Module:
    """The model with quantisers whose ranges are known."""
    import modelopt.torch.quantization as mtq

    @torch.no_grad()
    def run(model: nn.Module) -> None:
        for prompt in work.calibration:
            model(torch.tensor([prompt], device=current_device()), use_cache=False)

    # Without prompts only the weights are looked at.
    model = mtq.quantize(model, work.config, run if work.calibration else None)
    if set(quantized_modules(model)) != {layer.path for layer in work.plan.layers}:
        raise RuntimeError("modelopt quantised other layers than it did without weights")
    _replace_zero_ranges(model, work.plan)
    return model


def _replace_zero_ranges(model: nn.Module, plan: Plan) -> None:
    """Give a scale of 1 to blocks that are zero, by which modelopt would divide.

    A whole matrix that is zero gets the range of those that vLLM fuses with it, because they will share the largest.
    """
    groups: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if getattr(module, "_amax", None) is not None:
            path, _, quantizer = name.rpartition(".")
            fused = fused_group(path)[0] if quantizer == "weight_quantizer" else path
            groups.setdefault(f"{fused}.{quantizer}", []).append(module)
    for quantizers in groups.values():
        scale_of_one = quantizers[0].maxbound * (E4M3_MAX if plan.format.algorithm == "NVFP4" else 1)
        whole = [quantizer._amax for quantizer in quantizers if quantizer._amax.numel() == 1]
        largest = max((amax.item() for amax in whole), default=0.0)
        for quantizer in quantizers:
            amax = quantizer._amax
            amax.masked_fill_(amax == 0, (amax.numel() == 1 and largest) or scale_of_one)


def _add_missing(folder: Path, original: HFReader) -> None:
    """Add what transformers does not load, such as layers for speculative decoding, as it is."""
    exported = HFReader(folder)
    there = set(exported.names())
    missing = {name: original(name) for name in original.names() if name not in there}
    if not missing:
        return
    path = folder / INDEX
    weight_map = (
        json.loads(path.read_text())["weight_map"] if path.exists() else dict.fromkeys(exported.names(), SINGLE)
    )
    save_file(missing, folder / EXTRA, metadata={"format": "pt"})
    total = _total_bytes(exported) + sum(tensor.nbytes for tensor in missing.values())
    weight_map |= dict.fromkeys(missing, EXTRA)
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _kept_module(kept: Mapping[str, str], path: str) -> str:
    """The module of `kept` that a kept matrix belongs to: itself, or the experts."""
    experts = ".".join(path.split(".")[:-2])
    return experts if experts in kept else path


def _reason(kept: Mapping[str, str], path: str) -> str:
    return kept.get(_kept_module(kept, path), "no layer that transformers computes with")


def _tied(kept: Mapping[str, str], layers: Sequence[LayerReport]) -> list[LayerReport]:
    """Kept modules without a matrix of their own."""
    stored = {_kept_module(kept, layer.path) for layer in layers}
    return [
        LayerReport(path, False, f"{reason}, tied: its matrix is stored once, as another's", (), "", 0, 0)
        for path, reason in kept.items()
        if path not in stored
    ]


def _write_ignored(folder: Path, layers: Sequence[LayerReport], kept: Mapping[str, str]) -> None:
    """Name the kept layers by their whole paths in both files that loaders read; modelopt names beginnings of paths."""
    matrices = {_kept_module(kept, layer.path) for layer in layers if not layer.quantized}
    ignored = sorted(matrices | set(kept))
    check_ignored((layer.path for layer in layers if layer.quantized), ignored)
    for name, section, key in (
        (QUANTIZATION, "quantization", "exclude_modules"),
        ("config.json", "quantization_config", "ignore"),
    ):
        content = json.loads((folder / name).read_text())
        content[section][key] = ignored
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _total_bytes(reader: HFReader) -> int:
    return sum(reader.entry(name).nbytes for name in reader.names())


class _Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def stop(self, stage: str) -> None:
        """End a stage and begin the next."""
        now = time.perf_counter()
        self.seconds[stage], self._start = round(now - self._start, 3), now
