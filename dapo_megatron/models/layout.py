"""Which parallel layouts a model can have. No torch: the command line asks before any process starts."""

import math

from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture


def check_layout(architecture: Architecture, tensor: int, pipeline: int, model: str) -> None:
    """Tensor parallelism must divide heads and MLP, pipeline stages the layers.

    Args:
        architecture: the model's dimensions.
        tensor: tensor-parallel size.
        pipeline: number of pipeline stages.
        model: how messages call the model.

    Raises:
        UserError: naming the sizes that do not divide, and those that would.
    """
    heads, kv_heads, ffn = architecture.num_heads, architecture.num_kv_heads, architecture.ffn_size
    if heads % tensor or kv_heads % tensor or ffn % tensor:
        dimensions = f"{heads} attention heads and {kv_heads} key/value heads"
        if heads % tensor == kv_heads % tensor == 0:
            dimensions = f"the MLP size {ffn}"
        raise UserError(
            f"parallel.tensor={tensor} does not divide {dimensions} of {model}; "
            f"use {_either(_divisors(math.gcd(heads, kv_heads, ffn)))}"
        )
    if architecture.num_layers % pipeline:
        raise UserError(
            f"parallel.pipeline={pipeline} does not divide {architecture.num_layers} layers of {model}; "
            f"use {_either(_divisors(architecture.num_layers))}"
        )


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _either(numbers: list[int]) -> str:
    """[1] -> "1", [1, 3] -> "1 or 3", [1, 2, 4] -> "1, 2 or 4"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
