"""Which layers a quantisation changes, decided by whole module paths before any work is done."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dapo_megatron.checkpoint.quantize_formats import ROUTERS, Format, fused_group
from dapo_megatron.errors import UserError

HEAD, EMBEDDING, ROUTER = "output head", "embedding", "router of experts"


@dataclass(frozen=True)
class Layer:
    """A linear layer, or all experts of one block.

    Attributes:
        path: its module in transformers' model.
        inputs: input widths of its matrices; experts have two of them, the fused gate and up projection and down.
        outputs: output width of a linear layer; 0 for experts.
        experts: how many there are; 0 for a linear layer.
    """

    path: str
    inputs: tuple[int, ...]
    outputs: int = 0
    experts: int = 0

    @property
    def matrices(self) -> tuple[str, ...]:
        """Paths of the matrices that it is exported as, in transformers' names."""
        parts = ("gate_proj", "up_proj", "down_proj")
        return tuple(f"{self.path}.{i}.{part}" for i in range(self.experts) for part in parts) or (self.path,)


@dataclass(frozen=True)
class Plan:
    """The layers to quantise, and why each other module with a matrix is kept: {module path: reason}."""

    format: Format
    layers: tuple[Layer, ...]
    kept: Mapping[str, str]


def make_plan(model: nn.Module, format: Format, keep: Sequence[str]) -> Plan:
    """Decide about every layer of `model`, which may be on the meta device.

    Args:
        model: a causal language model of transformers.
        format: how the weights are to be stored.
        keep: paths of layers to keep in their precision. `*` stands for one whole component, `**` for one or more.

    Raises:
        UserError: if a path of `keep` matches nothing or splits layers that vLLM fuses, if experts cannot be
            quantised, or if nothing is left to quantise.
    """
    layers = {layer.path: layer for layer in _find_layers(model)}
    always = _always_kept(model)
    kept = {path: f"--keep {pattern}" for pattern in keep for path in _matching(pattern, {*layers, *always})} | always
    _check_fused(layers, kept)
    experts = [layer.path for layer in layers.values() if layer.experts and layer.path not in kept]
    if experts and not format.experts:
        raise UserError(
            f"vLLM has no kernel for experts in {format.algorithm}: use --format fp8 or nvfp4, or --keep {experts[0]} "
            "and those of every other block"
        )
    for layer in layers.values():
        if layer.path not in kept and (reason := _unsuitable(layer, format)):
            kept |= dict.fromkeys(_fused_with(layer.path, layers), reason)
    planned = tuple(layer for layer in layers.values() if layer.path not in kept)
    if not planned:
        reasons = "; ".join(sorted({kept[path] for path in layers}))
        raise UserError(f"there is nothing to quantise: all {len(layers)} layers are kept ({reasons})")
    return Plan(format, planned, kept)


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` is `path`, `*` standing for one whole component and `**` for one or more."""
    component = r"[^.]+"
    wildcards = {"*": component, "**": rf"{component}(?:\.{component})*"}
    expression = r"\.".join(wildcards.get(part) or re.escape(part) for part in pattern.split("."))
    return re.fullmatch(expression, path) is not None


def modelopt_config(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """modelopt's configuration that quantises exactly the planned layers, tried out on `model`.

    Args:
        model: on the meta device; it gets quantisers.
        plan: what to quantise.

    Raises:
        UserError: if modelopt has no quantisers for a planned layer.
    """
    import modelopt.torch.quantization as mtq

    preset = getattr(mtq, plan.format.preset)
    wanted = ("*weight_quantizer", "*input_quantizer")
    everything = [{"quantizer_name": "*", "enable": False}]
    everything += [entry for entry in preset["quant_cfg"] if entry["quantizer_name"] in wanted]
    found = set(quantized_modules(mtq.quantize(model, {"quant_cfg": everything, "algorithm": None})))
    planned = {layer.path for layer in plan.layers}
    if missing := sorted(planned - found):
        raise _no_quantizer(missing[0], model)
    disabled = [{"quantizer_name": f"{path}.*", "enable": False} for path in sorted(found - planned)]
    return {"quant_cfg": everything + disabled, "algorithm": preset["algorithm"]}


def quantized_modules(model: nn.Module) -> Iterator[str]:
    """Paths of the modules whose weights have an enabled quantiser; stacked experts count only with one for each."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            path, _, quantizer = name.rpartition(".")
            if quantizer.isdigit():  # one of a list, which belongs to the experts
                path, _, quantizer = path.rpartition(".")
            if quantizer in {"weight_quantizer", "down_proj_weight_quantizers"}:
                yield path


def check_ignored(quantized: Iterable[str], ignored: Sequence[str]) -> None:
    """Check that vLLM keeps no quantised layer: it also looks for ignored paths inside the names of its layers.

    Raises:
        UserError: naming the two paths that it would mix up.
    """
    for path in quantized:
        for name in _names_in_vllm(path):
            for other in ignored:
                if other in name or (name.endswith(".experts") and name in other):
                    raise UserError(
                        f"vLLM would take {path} for a layer that is kept: its name for it is {name}, and {other} is "
                        "kept; keep both or neither"
                    )


def _names_in_vllm(path: str) -> set[str]:
    """Layers of vLLM that a matrix becomes part of; it has one for all experts of a block."""
    *block, _, _ = path.split(".") if re.search(r"\.experts\.\d+\.", path) else (path, "", "")
    return {path, fused_group(path)[0], ".".join(block)}


def _find_layers(model: nn.Module) -> Iterator[Layer]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield Layer(path, (module.in_features,), module.out_features)
            continue
        stacked = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
        if not stacked or isinstance(module, nn.modules.conv._ConvNd):
            continue
        if set(stacked) != {"gate_up_proj", "down_proj"}:
            raise _no_quantizer(path, model)
        yield Layer(path, tuple(p.shape[2] for p in stacked.values()), experts=len(stacked["down_proj"]))


def _no_quantizer(path: str, model: nn.Module) -> UserError:
    name = type(model.get_submodule(path)).__name__
    return UserError(f"{path} is a {name}, which modelopt cannot quantise in a form that vLLM loads")


def _always_kept(model: nn.Module) -> dict[str, str]:
    """Head, embeddings and routers, by their place in the model."""
    kept: dict[str, str] = {}
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if module is head:
            kept[path] = HEAD
        elif isinstance(module, nn.Embedding):
            kept[path] = EMBEDDING
        elif name in ROUTERS and hasattr(model.get_submodule(parent), "experts"):
            kept[path] = ROUTER
    return kept


def _matching(pattern: str, paths: set[str]) -> list[str]:
    found = sorted(path for path in paths if matches(pattern, path))
    if not found:
        inside = any(path.startswith(f"{pattern}.") for path in paths)
        nearest = [f"{pattern}.**"] if inside else difflib.get_close_matches(pattern, sorted(paths), 3, cutoff=0)
        raise UserError(
            f"--keep {pattern} is no layer of this model; the nearest is {', '.join(nearest)} (a path is given in "
            "whole components; * stands for one of them, ** for any number)"
        )
    return found


def _fused_with(path: str, layers: Mapping[str, Layer]) -> list[str]:
    return [part for part in fused_group(path)[1] if part in layers]


def _check_fused(layers: Mapping[str, Layer], kept: Mapping[str, str]) -> None:
    for path in layers:
        group = _fused_with(path, layers)
        if path in kept and (others := [part for part in group if part not in kept]):
            raise UserError(f"{kept[path]} keeps {path}, which vLLM fuses with {', '.join(others)}: keep those as well")


def _unsuitable(layer: Layer, format: Format) -> str:
    """Why vLLM could not load the layer in this format; empty where it can."""
    for width in layer.inputs:
        if width % format.input_multiple:
            return (
                f"input width {width} is no multiple of {format.input_multiple}, as vLLM needs for {format.algorithm}"
            )
    if layer.outputs % format.fused_multiple and fused_group(layer.path)[0] != layer.path:
        return (
            f"output width {layer.outputs} is no multiple of {format.fused_multiple}, as vLLM needs for fused layers "
            f"in {format.algorithm}"
        )
    return ""
