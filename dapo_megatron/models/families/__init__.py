"""Model families, one file each. A file states how a config.json becomes an `Architecture`, and the parameter table.

A module in this package with a `FAMILY` is found by `models/registry.py`; docs/adding_a_model.md shows how to add one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter


@dataclass(frozen=True)
class Family:
    """What the rest of the package needs to know of a family.

    Attributes:
        hf_classes: its names in `architectures` of config.json.
        architecture: dimensions from a config.json. Raises UserError for what Megatron would silently not do.
        parameters: the rows of the parameter table.
    """

    hf_classes: tuple[str, ...]
    architecture: Callable[[dict[str, Any]], Architecture]
    parameters: Callable[[Architecture], Iterator[Parameter]]
