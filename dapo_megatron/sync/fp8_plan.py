"""FP8 on the way out: which matrices travel and are served in blocks of 128 x 128, and how. No torch.

The same numbers as `dapo-megatron quantize --format fp8_block`, under the names of DeepSeek-V3's checkpoints, which
vLLM also loads into experts: a scale for each block in `weight_scale_inv`.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from dapo_megatron.checkpoint.quantize_formats import FP8_BLOCK, ROUTERS, fused_group
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.models.table import parameter_table
from dapo_megatron.sync.plan import TransferPlan, Turn
from dapo_megatron.sync.wire import Bucket, Stretch

FP8, SCALE = "float8_e4m3fn", "float32"


def scale_name(matrix: str) -> str:
    """Name of the scales of a matrix: `x.weight` -> `x.weight_scale_inv`."""
    return f"{matrix}_scale_inv"


def quantized_matrices(arch: Architecture) -> frozenset[str]:
    """Hugging Face names of the matrices that travel in FP8: those of the layers, but for routers.

    vLLM wants input widths that are multiples of 128, and output widths, too, where it fuses layers. What it fuses, and
    all experts of a layer, are quantised together or not at all.

    Raises:
        UserError: if no matrix is left.
    """
    unsuitable, groups = set[str](), defaultdict[str, list[str]](list)
    for matrix, shape, group, fused in _matrices(arch):
        groups[group].append(matrix)
        if shape[1] % FP8_BLOCK or (fused and shape[0] % FP8_BLOCK):
            unsuitable.add(group)
    quantized = frozenset(name for group, names in groups.items() if group not in unsuitable for name in names)
    if not quantized:
        raise UserError(
            f"fleet.weight_format=fp8_block: no matrix of {arch.hf_class} has widths that are multiples of {FP8_BLOCK}"
        )
    return quantized


def quantization_config(arch: Architecture) -> dict[str, Any]:
    """What a server is told with `--hf-overrides`: the format, and the layers that are kept in their precision."""
    quantized = quantized_matrices(arch)
    kept: set[str] = set()
    for row in parameter_table(arch):
        for name in row.hf_names:
            path, _, kind = name.rpartition(".")
            if kind == "weight" and name not in quantized:
                kept |= {path, fused_group(path)[0]}
    return {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "ignored_layers": sorted(kept),
        }
    }


def fp8_plan(plan: TransferPlan, matrices: Collection[str]) -> TransferPlan:
    """`plan`, which has been proved, with each stretch of `matrices` in FP8 and its scales behind it.

    Raises:
        UserError: if the servers' layout cuts a block.
    """
    turns = (
        Turn(
            turn.sender,
            tuple(replace(row, hf_names=tuple(_names(row.hf_names, matrices))) for row in turn.rows),
            tuple(Bucket(bucket.group, tuple(_stretches(bucket, matrices))) for bucket in turn.buckets),
        )
        for turn in plan.turns
    )
    return replace(plan, turns=tuple(turns))


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale for each block of a matrix [rows, columns]."""
    return tuple(math.ceil(size / FP8_BLOCK) for size in shape)


def _matrices(arch: Architecture) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """Name and shape of every matrix of the layers that may be quantised, what decides with it, and whether its rows
    are joined with others'.
    """
    for row in parameter_table(arch):
        for name, shape in zip(row.hf_names, row.rule.hf_shapes, strict=True):
            path, _, kind = name.rpartition(".")
            if row.layer is None or kind != "weight" or len(shape) != 2 or path.rpartition(".")[2] in ROUTERS:
                continue
            if row.expert is None:
                group = fused_group(path)[0]
                yield name, shape, group, group != path
            else:
                yield name, shape, f"the experts of layer {row.layer}", True


def _names(names: tuple[str, ...], matrices: Collection[str]) -> Iterator[str]:
    for name in names:
        yield name
        if name in matrices:
            yield scale_name(name)


def _stretches(bucket: Bucket, matrices: Collection[str]) -> Iterator[Stretch]:
    for stretch in bucket.stretches:
        if stretch.name not in matrices:
            yield stretch
            continue
        length = stretch.shape[stretch.dim]
        if stretch.start % FP8_BLOCK or (stretch.stop % FP8_BLOCK and stretch.stop != length):
            raise UserError(
                f"fleet.tensor cuts {stretch} within a block of {FP8_BLOCK}: with fleet.weight_format=fp8_block each "
                "part must be whole blocks"
            )
        yield stretch._replace(dtype=FP8)
        start, stop = stretch.start // FP8_BLOCK, math.ceil(stretch.stop / FP8_BLOCK)
        yield Stretch(scale_name(stretch.name), SCALE, scale_shape(stretch.shape), stretch.dim, start, stop)


def original_rows(arch: Architecture) -> dict[str, Parameter]:
    """The rows of the parameter table by name: those of an FP8 plan have the scales' names as well."""
    return {row.name: row for row in parameter_table(arch)}
