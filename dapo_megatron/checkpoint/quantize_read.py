"""Quantised checkpoints read back: what each layer became, its weights again as numbers, and the model they make.

The arithmetic follows the formats, not the library that wrote them, so that a mistake of either shows.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.quantize_formats import E4M3_MAX, FP8_BLOCK, Format
from dapo_megatron.checkpoint.quantize_plan import Plan
from dapo_megatron.errors import UserError

E4M3_MIN = 2.0**-9  # the least positive number; scales of NVFP4's blocks are no smaller
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EVEN = 1 - 2.0**-24  # a tie goes to the neighbour with the even last bit: at these bounds, the upper one
_E2M1_BOUNDS = torch.tensor([0.25, 0.75 * _EVEN, 1.25, 1.75 * _EVEN, 2.5, 3.5 * _EVEN, 5.0])
NVFP4_BLOCK = 16

SCALES = ("weight_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class LayerReport:
    """One matrix of the exported checkpoint.

    Attributes:
        path: module path as in the files, without `.weight`.
        quantized: whether it has scales.
        reason: why it was kept; empty where it was quantised.
        shape, dtype: of the original matrix and of what the file holds.
        bytes_before, bytes_after: with the scales.
        scale_min, scale_mean, scale_max: what stored numbers are multiplied by; None where kept.
        input_scale: None where it is taken at run time or there is none.
        error: ||w - original|| / ||original||, 0 where both are zero; None where kept.
    """

    path: str
    quantized: bool
    reason: str
    shape: tuple[int, ...]
    dtype: str
    bytes_before: int
    bytes_after: int
    scale_min: float | None = None
    scale_mean: float | None = None
    scale_max: float | None = None
    input_scale: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class ReadBack:
    """A quantised checkpoint as it lies on the disk: its matrices and all weights, in the original's dtypes."""

    layers: tuple[LayerReport, ...]
    weights: dict[str, Tensor]


def read_back(exported: HFReader, original: HFReader, format: Format, reason: Callable[[str], str]) -> ReadBack:
    """Read every tensor and compare it with the original's.

    Args:
        exported: the quantised checkpoint.
        original: what it was made of.
        format: how its weights are stored.
        reason: tells why the matrix of a path was kept.

    Raises:
        UserError: if a tensor is missing or was changed though it was kept, or if a weight or scale is not finite.
    """
    names, layers, weights = set(exported.names()), [], {}
    for name in sorted(names):
        path, _, kind = name.rpartition(".")
        if kind in SCALES:
            continue
        before, stored = original(name), exported(name)
        if f"{path}.weight_scale" in names and kind == "weight":
            scales = {scale: exported(f"{path}.{scale}") for scale in SCALES if f"{path}.{scale}" in names}
            weight = dequantize(stored, scales["weight_scale"], scales.get("weight_scale_2"), format)
            layers.append(_quantized(path, before, stored, weight, scales, format))
            weights[name] = weight.to(before.dtype)
            continue
        if not _same_bytes(before.to(stored.dtype), stored):
            raise UserError(f"{exported.folder} holds another {name} than {original.folder}")
        weights[name] = stored
        if kind == "weight" and stored.ndim == 2:
            size = stored.nbytes
            layers.append(LayerReport(path, False, reason(path), tuple(stored.shape), _name(stored), size, size))
    return ReadBack(tuple(layers), weights)


def dequantize(stored: Tensor, scale: Tensor, scale_2: Tensor | None, format: Format) -> Tensor:
    """The weights of a stored matrix, float32 [N, K].

    Args:
        stored: e4m3 [N, K], or uint8 [N, K / 2] with two e2m1 numbers each, the even one in the low bits.
        scale: one number; [N]; one per 128x128 block, in any shape; or e4m3 [N, K / 16].
        scale_2: what the e4m3 scales are multiplied by; None in the other formats.
        format: which of these it is.
    """
    scale = scale.float()
    if format.algorithm == "NVFP4":
        assert scale_2 is not None
        bits = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).long()  # [N, K]
        numbers = E2M1[bits & 7] * torch.where(bits > 7, -1.0, 1.0)
        return numbers * (scale * scale_2).repeat_interleave(NVFP4_BLOCK, dim=1)
    rows, columns = stored.shape
    if format.algorithm == "FP8_PB_WO":
        blocks = scale.reshape(math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK))
        scale = blocks.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    elif format.algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = scale.unsqueeze(1)
    return stored.float() * scale


def round_inputs(inputs: Tensor, input_scale: float | None, format: Format) -> Tensor:
    """What a kernel of this format makes of a layer's inputs, in their own shape and dtype.

    Args:
        inputs: floating [..., K].
        input_scale: of all inputs; None in formats that take scales at run time.
        format: FP8 with one scale, one per token or one per 128 inputs of a token; or NVFP4 with one per 16.
    """
    numbers = inputs.float()
    if format.static_inputs:
        assert input_scale is not None
        rounded = _nvfp4(numbers, input_scale) if format.algorithm == "NVFP4" else _e4m3(numbers, input_scale)
    else:
        block = FP8_BLOCK if format.algorithm == "FP8_PB_WO" else numbers.shape[-1]
        blocks = numbers.unflatten(-1, (-1, block))
        largest = blocks.abs().amax(-1, keepdim=True)
        rounded = _e4m3(blocks, torch.where(largest == 0, 1.0, largest / E4M3_MAX)).flatten(-2)
    return rounded.to(inputs.dtype)


def _e4m3(numbers: Tensor, scale: Tensor | float) -> Tensor:
    return (numbers / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def _nvfp4(numbers: Tensor, scale_2: float) -> Tensor:
    blocks = numbers.unflatten(-1, (-1, NVFP4_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / (E2M1[-1].item() * scale_2)
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale_2
    nearest = torch.bucketize((blocks / scale).abs(), _E2M1_BOUNDS.to(blocks.device))
    rounded: Tensor = E2M1.to(blocks.device)[nearest] * blocks.sign() * scale
    return rounded.flatten(-2)


class _RoundedInputs(TorchFunctionMode):
    """While it is active, inputs of the linear layers with these weights are rounded as their kernels would."""

    def __init__(self, scales: Mapping[int, float | None], format: Format) -> None:
        super().__init__()
        self._scales = scales  # by the weight's address
        self._format = format

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear and args[1].data_ptr() in self._scales:
            args = (round_inputs(args[0], self._scales[args[1].data_ptr()], self._format), *args[1:])
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def rounded_inputs(
    model: nn.Module, plan: Plan, layers: tuple[LayerReport, ...], exported_path: Callable[[str], str]
) -> Iterator[None]:
    """Let `model`, which has the weights of a `ReadBack`, compute with inputs rounded as the format's kernels do.

    Args:
        model: of transformers, its experts computed by plain linear functions ("eager").
        plan: what was quantised.
        layers: of the `ReadBack`.
        exported_path: the path in the files of a module path of transformers.
    """
    by_path = {layer.path: layer.input_scale for layer in layers}
    scales: dict[int, float | None] = {}
    for layer in plan.layers:
        module = model.get_submodule(layer.path)
        if not layer.experts:
            scales[module.weight.data_ptr()] = by_path[exported_path(layer.path)]  # type: ignore[operator]
        for i in range(layer.experts):
            for stacked, part in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj")):
                address = getattr(module, stacked)[i].data_ptr()
                scales[address] = by_path[exported_path(f"{layer.path}.{i}.{part}")]
    with _RoundedInputs(scales, plan.format):
        yield


def _quantized(
    path: str, before: Tensor, stored: Tensor, weight: Tensor, scales: Mapping[str, Tensor], format: Format
) -> LayerReport:
    scale = scales["weight_scale"].float() * scales.get("weight_scale_2", torch.ones(())).float()
    input_scale = scales["input_scale"].item() if "input_scale" in scales else None
    if not (weight.isfinite().all() and scale.isfinite().all() and (scale > 0).all()):
        raise UserError(f"{path}: its weights or their scales are not finite after quantisation; are the original's?")
    if format.static_inputs and not (input_scale is not None and 0 < input_scale < math.inf):
        raise UserError(f"{path} has no scale for its inputs ({input_scale}): no calibration prompt reached it")
    reference = before.float()
    difference, norm = (weight - reference).norm().item(), reference.norm().item()
    return LayerReport(
        path,
        True,
        "",
        tuple(before.shape),
        _name(stored),
        before.nbytes,
        stored.nbytes + sum(tensor.nbytes for tensor in scales.values()),
        scale.min().item(),
        scale.mean().item(),
        scale.max().item(),
        input_scale,
        difference / norm if norm else difference,
    )


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equality that also holds of NaN."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
