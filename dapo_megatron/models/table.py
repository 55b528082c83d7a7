"""The parameter table: which Megatron parameter is made of which Hugging Face tensors. No torch.

Loading, export, checkpoints, weight push and the planner all read it, so that names and layouts are stated once, by
the model's family.
"""

from collections.abc import Iterator

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.models.registry import family_of


def parameter_table(arch: Architecture, *, extra: bool = False) -> Iterator[Parameter]:
    """The rows of a model, in the order of a forward pass.

    Args:
        arch: the model.
        extra: also those that are not trained (`Parameter.extra`), at the end.
    """
    return (row for row in family_of(arch).parameters(arch) if extra or not row.extra)


def hf_shapes(arch: Architecture, *, extra: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor of `arch`, in the order `export_weights` yields them."""
    return {
        name: shape
        for row in parameter_table(arch, extra=extra)
        for name, shape in zip(row.hf_names, row.rule.hf_shapes, strict=True)
    }


def exact_tensors(arch: Architecture) -> frozenset[str]:
    """The Hugging Face tensors that are fp32 in a model of any precision: biases of routers."""
    return frozenset(name for row in parameter_table(arch, extra=True) if row.is_buffer for name in row.hf_names)
