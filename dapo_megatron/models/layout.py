"""Which parallel layouts a model can have. No torch: the command line asks before any process starts.

Each rule is one that megatron-core or Transformer Engine breaks only after minutes of start-up, or silently.
"""

import math

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture


def check_layout(architecture: Architecture, parallel: ParallelConfig, model: str) -> None:
    """Refuse a layout that the model cannot have, or that would train it wrongly.

    Args:
        architecture: the model's dimensions.
        parallel: the layout.
        model: how messages call the model.

    Raises:
        UserError: naming the keys, their values, the rule and what would be allowed.
    """
    _check_tensor(architecture, parallel, model)
    _check_pipeline(architecture, parallel, model)
    _check_context(architecture, parallel, model)
    if architecture.num_experts:
        _check_experts(architecture, parallel, model)
    elif parallel.expert > 1 or parallel.expert_tensor > 1:
        key = "expert" if parallel.expert > 1 else "expert_tensor"
        raise UserError(f"parallel.{key}={getattr(parallel, key)} needs a model with experts; {model} has none: use 1")


def check_ranks(parallel: ParallelConfig, ranks: int, where: str) -> None:
    """The ranks hold whole copies of the model, both of its dense part and of its experts.

    A pipeline stage's ranks form two grids: tensor x context x data for dense layers, expert x expert_tensor x
    (expert) data for experts.

    Args:
        parallel: the layout.
        ranks: number of trainer ranks.
        where: what messages call that number ("--nproc").

    Raises:
        UserError: if the number of ranks is no multiple of either grid.
    """
    dense, experts = ("tensor", "pipeline", "context"), ("pipeline", "expert", "expert_tensor")
    multiple = math.lcm(_product(parallel, dense), _product(parallel, experts))
    for keys in (dense, experts):
        if ranks % (product := _product(parallel, keys)):
            raise UserError(
                f"{where} {ranks} is not a multiple of {' x '.join(f'parallel.{key}' for key in keys)} = "
                f"{' x '.join(str(getattr(parallel, key)) for key in keys)} = {product}; use a multiple of {multiple}"
            )


def _product(parallel: ParallelConfig, keys: tuple[str, ...]) -> int:
    return math.prod(getattr(parallel, key) for key in keys)


def _check_tensor(architecture: Architecture, parallel: ParallelConfig, model: str) -> None:
    tensor = parallel.tensor
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    sizes = {
        f"{heads} attention heads and {kv_heads} key/value heads": math.gcd(heads, kv_heads),
        f"the MLP size {architecture.ffn_size}": architecture.ffn_size if architecture.has_dense_layers else 0,
        f"the MLP size {architecture.shared_ffn_size} of the shared experts": architecture.shared_ffn_size,
    }
    for dimensions, size in sizes.items():  # 0: every size divides it
        if size % tensor:
            raise UserError(
                f"parallel.tensor={tensor} does not divide {dimensions} of {model}; "
                f"use {_either(_divisors(math.gcd(*sizes.values())))}"
            )
    if parallel.sequence and tensor == 1:
        raise UserError(
            "parallel.sequence=true needs parallel.tensor > 1: it splits over the tensor-parallel ranks; use false"
        )


def _check_pipeline(architecture: Architecture, parallel: ParallelConfig, model: str) -> None:
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks > 1 and stages == 1:
        raise UserError(
            f"parallel.virtual_pipeline={chunks} needs parallel.pipeline > 1: it interleaves the chunks of several "
            "stages; use 1"
        )
    if parallel.pipeline_layers is not None:
        _check_pipeline_layers(architecture, parallel, model)
        return
    if architecture.num_layers % stages:
        raise UserError(
            f"parallel.pipeline={stages} does not divide {architecture.num_layers} layers of {model}; "
            f"use {_either(_divisors(architecture.num_layers))}, or say in parallel.pipeline_layers how many each has"
        )
    per_stage = architecture.num_layers // stages
    if per_stage % chunks:
        raise UserError(
            f"parallel.virtual_pipeline={chunks} does not divide the {per_stage} layers of each of the {stages} "
            f"pipeline stages of {model}; use {_either(_divisors(per_stage))}"
        )


def _check_pipeline_layers(architecture: Architecture, parallel: ParallelConfig, model: str) -> None:
    layers, chunks = parallel.pipeline_layers or [], parallel.pipeline * parallel.virtual_pipeline
    if len(layers) != chunks:
        raise UserError(
            f"parallel.pipeline_layers={layers} has {len(layers)} numbers; it needs parallel.pipeline x "
            f"parallel.virtual_pipeline = {parallel.pipeline} x {parallel.virtual_pipeline} = {chunks}"
        )
    if min(layers) < 1 or sum(layers) != architecture.num_layers:
        raise UserError(
            f"parallel.pipeline_layers={layers} must be numbers of at least 1 that add up to the "
            f"{architecture.num_layers} layers of {model}; they add up to {sum(layers)}"
        )


def _check_context(architecture: Architecture, parallel: ParallelConfig, model: str) -> None:
    """Transformer Engine's a2a trades the split of the tokens for one of the heads that a rank holds."""
    heads, kv_heads = architecture.num_heads // parallel.tensor, architecture.num_kv_heads // parallel.tensor
    if parallel.context_comm == "a2a" and (heads % parallel.context or kv_heads % parallel.context):
        raise UserError(
            f"parallel.context_comm=a2a splits the heads of each tensor-parallel rank, but parallel.context="
            f"{parallel.context} does not divide {heads} attention heads and {kv_heads} key/value heads of {model} at "
            f"parallel.tensor={parallel.tensor}; use parallel.context={_either(_divisors(math.gcd(heads, kv_heads)))}, "
            "or parallel.context_comm=p2p or all_gather"
        )


def _check_experts(architecture: Architecture, parallel: ParallelConfig, model: str) -> None:
    experts, ffn = architecture.num_experts, architecture.expert_ffn_size
    if experts % parallel.expert:
        raise UserError(
            f"parallel.expert={parallel.expert} does not divide {experts} experts of {model}; "
            f"use {_either(_divisors(experts))}"
        )
    if ffn % parallel.expert_tensor:
        raise UserError(
            f"parallel.expert_tensor={parallel.expert_tensor} does not divide the MLP size {ffn} of each expert of "
            f"{model}; use {_either(_divisors(ffn))}"
        )
    # Megatron's MoE layer raises at the first training step: every tensor-parallel rank would route every token.
    if parallel.tensor > 1 and not parallel.sequence:
        raise UserError(
            f"parallel.tensor={parallel.tensor} with the experts of {model} needs parallel.sequence=true: "
            "each rank routes its own tokens"
        )


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _either(numbers: list[int]) -> str:
    """[1] -> "1", [1, 3] -> "1 or 3", [1, 2, 4] -> "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
