"""From a checkpoint folder to its architecture and its family. Families are the modules of `models/families`."""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from dapo_megatron.errors import UserError
from dapo_megatron.models import families
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.families import Family

_FAMILIES: dict[str, Family] = {
    hf_class: module.FAMILY
    for name in sorted(info.name for info in pkgutil.iter_modules(families.__path__))
    for module in [importlib.import_module(f"{families.__name__}.{name}")]
    for hf_class in module.FAMILY.hf_classes
}
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)


def family_of(arch: Architecture) -> Family:
    """The family of an architecture."""
    return _FAMILIES[arch.hf_class]


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face checkpoint folder.

    Raises:
        UserError: if the folder or the file is missing or is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"model.path: {path} does not exist: it says of which model a checkpoint is") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model.path: {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"model.path: {path} must hold a JSON object")
    return config


def architecture_of(folder: str | Path) -> Architecture:
    """The architecture of the checkpoint in `folder`.

    Raises:
        UserError: for an unknown architecture, naming those that are supported.
    """
    config = read_hf_config(folder)
    names = config.get("architectures") or ["(none)"]
    family = _FAMILIES.get(names[0])
    if family is None:
        raise UserError(
            f"model.path: {Path(folder) / 'config.json'} names the architecture {names[0]}; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return family.architecture(config)
