"""Which combinations of precision, recompute and layer backend a model and a machine allow. No torch.

Each rule is one that Transformer Engine or megatron-core breaks only at the first forward pass, or silently. Sources:
the checks of megatron-core's TransformerConfig, and Transformer Engine's recipe support and dimension checks.
"""

import re
from dataclasses import dataclass

from dapo_megatron.config.precision import ALIGNMENT, Fp8Config, Recipe
from dapo_megatron.config.training import OptimizerConfig, ParallelConfig, RecomputeModule, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.placement import chunk_layers

Version = tuple[int, int]

# What Transformer Engine's attention over packed sequences has kernels for.
TE_PRECISIONS = ("bf16", "fp16", "fp8")

# Recomputed by keeping the output's place and dropping its data, which FP8 must know about.
OUTPUT_DISCARDING: tuple[RecomputeModule, ...] = ("layernorm", "moe_act")


@dataclass(frozen=True)
class RecipeSupport:
    """What a recipe needs: a GPU of compute capability `gpu` or later, or one of `only`; and the oldest versions."""

    gpu: Version
    only: tuple[Version, ...] = ()
    cuda: Version | None = None
    te: Version | None = None

    def runs_on(self, capability: Version) -> bool:
        """Whether a GPU of this compute capability has the instructions."""
        return capability in self.only if self.only else capability >= self.gpu


SUPPORT: dict[Recipe, RecipeSupport] = {
    "delayed": RecipeSupport(gpu=(8, 9)),
    "tensorwise": RecipeSupport(gpu=(8, 9), te=(2, 2)),
    "blockwise": RecipeSupport(gpu=(9, 0), te=(2, 3), cuda=(12, 9)),
    "mxfp8": RecipeSupport(gpu=(10, 0), te=(2, 1), only=((10, 0), (10, 3))),
}
RECOMPUTE_SUPPORT: Version = (2, 6)  # Transformer Engine that recomputes OUTPUT_DISCARDING modules in FP8

# Transformer Engine's attention over packed sequences, by how context-parallel ranks exchange keys and values.
CONTEXT_SUPPORT: dict[str, Version] = {"a2a": (2, 10), "all_gather": (2, 18)}


@dataclass(frozen=True)
class Machine:
    """What a trainer rank runs on.

    `capability`: compute capability of its GPU, None without one; `cuda`: the CUDA version torch was built with;
    `te`: version of Transformer Engine, None where it is missing.
    """

    capability: Version | None
    cuda: Version | None
    te: str | None


def check_precision(
    architecture: Architecture,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    *,
    model: str,
) -> None:
    """Refuse what no machine could run.

    Args:
        architecture: the model's dimensions.
        training: precision, layer backend and recompute.
        optimizer: where its states lie.
        parallel: the layout.
        model: how messages call the model.

    Raises:
        UserError: naming the key, its value, the rule and what would be allowed.
    """
    _check_recompute(architecture, training, model)
    if training.layer_backend == "te" and training.precision not in TE_PRECISIONS:
        raise UserError(
            f"training.layer_backend=te has no attention over packed sequences in training.precision="
            f"{training.precision}; use auto or local, or training.precision={' or '.join(TE_PRECISIONS)}"
        )
    fp8 = training.fp8
    if training.precision != "fp8":
        if fp8 != Fp8Config():
            raise UserError(
                f"training.fp8 is set, but training.precision={training.precision} does not read it; "
                "use training.precision=fp8 or leave training.fp8 out"
            )
        return
    if training.layer_backend == "local":
        raise UserError(
            "training.precision=fp8 needs Transformer Engine's layers, but training.layer_backend=local; use auto or te"
        )
    _check_recipe(training)
    if optimizer.cpu_offload and fp8.recipe != "delayed":
        raise UserError(
            f"optimizer.cpu_offload={optimizer.cpu_offload} in FP8 works with training.fp8.recipe=delayed only, not "
            f"{fp8.recipe}; use delayed or optimizer.cpu_offload=0"
        )
    _check_bf16_layers(architecture, fp8, parallel, model)
    _check_dimensions(architecture, fp8.recipe, parallel, model)


def _check_recompute(architecture: Architecture, training: TrainingConfig, model: str) -> None:
    modules = training.recompute_modules
    if training.recompute != "selective":
        if modules != TrainingConfig.model_validate({}).recompute_modules:
            raise UserError(
                f"training.recompute_modules={modules} is read where training.recompute=selective only, not "
                f"{training.recompute}; use selective or leave it out"
            )
        return
    if not modules:
        raise UserError("training.recompute=selective with empty training.recompute_modules recomputes nothing")
    unfit = set() if architecture.has_dense_layers else {"mlp"}
    if not architecture.num_experts:
        unfit = {"moe", "moe_act"}
    if wrong := sorted(unfit.intersection(modules)):
        has = "experts in every layer" if architecture.num_experts else "no experts"
        raise UserError(
            f"training.recompute_modules names {wrong[0]}, but {model} has {has}; "
            f"use {' or '.join(sorted({'mlp', 'moe'} - unfit))}"
        )
    if "moe_act" in modules and training.layer_backend == "local":
        raise UserError(
            "training.recompute_modules names moe_act, which the grouped experts of Transformer Engine have, but "
            "training.layer_backend=local; use moe"
        )


def _check_recipe(training: TrainingConfig) -> None:
    """What a recipe excludes."""
    fp8 = training.fp8
    if fp8.recipe == "delayed" and fp8.first_last_layers_bf16:
        raise UserError(
            "training.fp8.first_last_layers_bf16=true does not go with training.fp8.recipe=delayed, whose maxima are "
            "collected over all layers at once; use tensorwise, blockwise or mxfp8"
        )
    if fp8.recipe == "delayed" and (modules := _discarded(training)):
        raise UserError(
            f"training.recompute_modules names {modules[0]}, which training.fp8.recipe=delayed cannot compute again; "
            "use another recipe or other modules"
        )
    if fp8.recipe == "mxfp8" and not fp8.param_gather:
        raise UserError(
            "training.fp8.recipe=mxfp8 needs training.fp8.param_gather=true: without it bf16 weights and both "
            "quantised copies of them take memory at the same time"
        )
    defaults = Fp8Config()
    for key in ("margin", "amax_history", "amax_algorithm"):
        if fp8.recipe != "delayed" and (value := getattr(fp8, key)) != getattr(defaults, key):
            raise UserError(
                f"training.fp8.{key}={value} is read with training.fp8.recipe=delayed only, not {fp8.recipe}; "
                "leave it out"
            )


def _discarded(training: TrainingConfig) -> list[RecomputeModule]:
    """The recomputed modules whose output's data is dropped."""
    if training.recompute != "selective":
        return []
    return [module for module in training.recompute_modules if module in OUTPUT_DISCARDING]


def _check_bf16_layers(architecture: Architecture, fp8: Fp8Config, parallel: ParallelConfig, model: str) -> None:
    keys = ("bf16_layers_at_start", "bf16_layers_at_end")
    counts = {key: getattr(fp8, key) for key in keys}
    if not fp8.first_last_layers_bf16:
        for key, count in counts.items():
            if count != getattr(Fp8Config(), key):
                raise UserError(
                    f"training.fp8.{key}={count} is read with training.fp8.first_last_layers_bf16=true only"
                )
        return
    stages = [0] * parallel.pipeline
    for i, layers in enumerate(chunk_layers(architecture.num_layers, parallel)):
        stages[i % parallel.pipeline] += len(layers)
    for (key, count), held in zip(counts.items(), (stages[0], stages[-1]), strict=True):
        if count > held:
            raise UserError(
                f"training.fp8.{key}={count} exceeds the {held} layers of a pipeline stage of {model} "
                f"(parallel.pipeline={parallel.pipeline}); use at most {held}"
            )
    total = sum(counts.values())
    if not total:
        raise UserError("training.fp8.first_last_layers_bf16=true with no layers at start or end; use false")
    if total >= architecture.num_layers:
        raise UserError(
            f"training.fp8 keeps {' + '.join(map(str, counts.values()))} layers in bf16, which leaves none of the "
            f"{architecture.num_layers} layers of {model} in FP8; use fewer, or training.precision=bf16"
        )


def _check_dimensions(architecture: Architecture, recipe: Recipe, parallel: ParallelConfig, model: str) -> None:
    """Rows and columns that a rank holds of each weight are multiples of the recipe's alignment."""
    multiple = ALIGNMENT[recipe]
    sizes = [("hidden size", architecture.hidden_size, "", 1), *_attention_sizes(architecture, parallel)]
    tensor = ("tensor", parallel.tensor)
    if architecture.has_dense_layers:
        sizes.append(("MLP size", architecture.ffn_size, *tensor))
    if architecture.num_experts:
        sizes.append(("MLP size of each expert", architecture.expert_ffn_size, "expert_tensor", parallel.expert_tensor))
    if architecture.shared_ffn_size:
        sizes.append(("MLP size of the shared experts", architecture.shared_ffn_size, *tensor))
    for name, size, key, ranks in sizes:
        if size % (multiple * ranks):
            split = f" / parallel.{key}={ranks}" if ranks > 1 else ""
            raise UserError(
                f"training.fp8.recipe={recipe} needs multiples of {multiple}, but the {name} of {model}{split} is "
                f"{size / ranks:g}; {_remedy(size, recipe, key)}"
            )


def _attention_sizes(architecture: Architecture, parallel: ParallelConfig) -> list[tuple[str, int, str, int]]:
    """Rows and columns of attention's weights: name, size, and over how many ranks of which key they are split."""
    heads, kv_heads, latent = architecture.num_heads, architecture.num_kv_heads, architecture.latent
    tensor = ("tensor", parallel.tensor)
    output = ("attention output", heads * architecture.value_dim, *tensor)
    if latent is None:
        return [("query, key and value rows", (heads + 2 * kv_heads) * architecture.head_dim, *tensor), output]
    return [
        ("query rank", latent.query_rank or 0, "", 1),
        ("key/value rank", latent.kv_rank, "", 1),
        ("key/value rank with the rotated part", latent.kv_rank + latent.rope_dim, "", 1),
        ("query rows", heads * architecture.head_dim, *tensor),
        ("key and value rows", heads * (latent.nope_dim + latent.value_dim), *tensor),
        output,
    ]


def _remedy(size: int, recipe: Recipe, key: str) -> str:
    """What would make `size` fit: fewer ranks, a recipe with a smaller multiple, or bf16."""
    if key and size % ALIGNMENT[recipe] == 0:
        most = size // ALIGNMENT[recipe]
        return f"use a parallel.{key} that divides {most}"
    if smaller := [other for other, multiple in ALIGNMENT.items() if size % multiple == 0]:
        return f"use the recipe {' or '.join(smaller)}"
    return "use training.precision=bf16"


def check_hardware(
    training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig, machine: Machine
) -> None:
    """Refuse what this machine cannot run; the other rules are `check_precision`'s.

    Raises:
        UserError: naming the key, what the machine has, and what is needed.
    """
    if machine.capability is None and optimizer.cpu_offload:
        raise UserError(
            f"optimizer.cpu_offload={optimizer.cpu_offload} needs a GPU: on this machine the optimizer's states are in "
            "host memory anyway; use 0"
        )
    if optimizer.cpu_offload and machine.te is None:
        raise UserError(
            f"optimizer.cpu_offload={optimizer.cpu_offload} needs Transformer Engine, without which an offloaded state "
            "cannot be resumed; install it or use 0"
        )
    if training.precision == "fp8":
        _check_fp8_machine(training, machine)
    if machine.capability is not None and training.precision == "bf16" and machine.capability < (8, 0):
        raise UserError(
            f"training.precision=bf16 needs a GPU of compute capability 8.0 or later, this one has "
            f"{_dotted(machine.capability)}; use fp16 or fp32"
        )
    te_layers = training.layer_backend != "local" and training.precision in TE_PRECISIONS
    if machine.te is not None and te_layers and parallel.context > 1:
        needed = CONTEXT_SUPPORT.get(parallel.context_comm)
        if needed is not None and parse_version(machine.te) < needed:
            raise UserError(
                f"parallel.context_comm={parallel.context_comm} with packed sequences needs Transformer Engine "
                f"{_dotted(needed)}, this machine has {machine.te}; use p2p"
            )


def _check_fp8_machine(training: TrainingConfig, machine: Machine) -> None:
    recipe = training.fp8.recipe
    support = SUPPORT[recipe]
    where = f"training.precision=fp8 with training.fp8.recipe={recipe}"
    if machine.capability is None:
        raise UserError(f"{where} needs a CUDA GPU, which this machine lacks; use training.precision=bf16")
    if machine.te is None:
        raise UserError(f"{where} needs Transformer Engine: run `pip install 'transformer-engine[pytorch]'`")
    if not support.runs_on(machine.capability):
        needed = " or ".join(map(_dotted, support.only)) or f"{_dotted(support.gpu)} or later"
        fitting = [name for name, other in SUPPORT.items() if other.runs_on(machine.capability)]
        raise UserError(
            f"{where} needs a GPU of compute capability {needed}, this one has {_dotted(machine.capability)}; use "
            + (f"the recipe {' or '.join(fitting)}" if fitting else "training.precision=bf16")
        )
    if support.cuda is not None and (machine.cuda is None or machine.cuda < support.cuda):
        has = _dotted(machine.cuda) if machine.cuda else "none"
        raise UserError(f"{where} needs CUDA {_dotted(support.cuda)}, torch was built with {has}")
    versions = [version for version in (support.te, _discarded(training) and RECOMPUTE_SUPPORT) if version]
    if versions and parse_version(machine.te) < max(versions):
        raise UserError(f"{where} needs Transformer Engine {_dotted(max(versions))}, this machine has {machine.te}")


def fp8_environment(capability: Version | None) -> dict[str, str]:
    """Variables that Transformer Engine reads while it is imported, for a GPU of this compute capability.

    Its blockwise scales are powers of two unless told otherwise, up to twice too coarse. vLLM's `fp8_per_block` scales
    the same blocks in fp32: with fp32 scales here too, trainer and servers round weights alike. Only Hopper can:
    Blackwell computes blocks through mxfp8, whose scales are powers of two.
    """
    hopper = capability is not None and capability[0] == 9
    return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"} if hopper else {}


def parse_version(text: str) -> Version:
    """Major and minor number: "2.16.0+4220403e" -> (2, 16)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    return int(match[1]), int(match[2])


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
