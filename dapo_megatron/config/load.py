"""From a YAML file and dotted overrides to a validated `Config`."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from dapo_megatron.config.reference import config_keys
from dapo_megatron.config.run import Config
from dapo_megatron.errors import UserError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides` such as "rollout.samples_per_prompt=16", and validate the result.

    Relative paths in the file stay as they are: they are relative to the current directory.

    Raises:
        UserError: for a missing file, invalid YAML, an override without "=", an unknown key (the nearest valid key
            is named) or a value against its rule; one sentence per fault, one fault per line.
    """
    merged = _read_yaml(Path(path))
    if isinstance(merged.get("algorithm"), str):  # so that `algorithm.clip.high=0.3` can be put on top
        merged.algorithm = {"preset": merged.algorithm}
    for override in overrides:
        merged = _apply(merged, override)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        overridden = {override.partition("=")[0] for override in overrides}
        faults = [_sentence(fault, str(path), overridden) for fault in error.errors()]
        raise UserError("\n".join(faults)) from None


def _read_yaml(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"{path}: the config file cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} must hold sections such as `run:` and `model:`, not a list or a single value")
    return config


def _apply(config: DictConfig, override: str) -> DictConfig:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"the override {override!r} must have the form KEY=VALUE, for example run.steps=20")
    if key == "algorithm" and not value.startswith("{"):  # a preset's name; what the file says beside it stays
        override = f"algorithm.preset={value}"
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist([override]))
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"the override {override!r} cannot be applied: {_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _sentence(fault: ErrorDetails, path: str, overridden: set[str]) -> str:
    """One fault that pydantic found, as one sentence naming the file or override, the key, the rule and the value."""
    key = ".".join(str(part) for part in fault["loc"])
    source = "command line" if key in overridden else path
    if fault["type"] == "extra_forbidden":
        return f"{source}: unknown key {key}; did you mean {_nearest(key)}?"
    if fault["type"] == "missing":
        return f"{source}: the key {key} is required"
    if fault["type"] == "model_type":
        return f"{source}: {key} must be a section of keys, not {fault['input']!r}"
    if fault["type"] == "value_error":
        return f"{source}: {key + ': ' if key else ''}{fault['msg'].removeprefix('Value error, ')}"
    rule = fault["msg"].removeprefix("Input should be ")
    return f"{source}: {key}={fault['input']!r} is not allowed, it must be {rule}"


def _nearest(unknown: str) -> str:
    """The valid key most like `unknown`, by its whole dotted name or by its last part alone."""

    def likeness(name: str) -> float:
        last = SequenceMatcher(None, _last_part(unknown), _last_part(name)).ratio()
        return SequenceMatcher(None, unknown, name).ratio() + last

    return max((key.name for key in config_keys()), key=likeness)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _first_line(error: Any) -> str:
    return str(error).strip().partition("\n")[0]
