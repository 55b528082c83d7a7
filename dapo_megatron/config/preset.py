"""Presets: named starting values, one short YAML each in `dapo_megatron/config/presets`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

FOLDER = Path(__file__).parent / "presets"
PAPER_CACHE_SHARE = 5
"""The paper's L_cache is a fifth of its L_max (4,096 of 20,480 tokens)."""


def preset_names() -> list[str]:
    """All presets, in the order of the alphabet."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def preset_values(name: str) -> dict[str, Any]:
    """The sections of a preset.

    Raises:
        ValueError: if there is none of this name.
    """
    if name not in preset_names():
        raise ValueError(f"algorithm.preset ({name}) must be one of {', '.join(preset_names())}")
    values = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    assert isinstance(values, dict)
    return {str(section): keys for section, keys in values.items()}


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with its preset filled in below what it says itself; a name in place of the section is one.

    Filling in twice changes nothing: what was filled in is then said.
    """
    values = dict(values)
    algorithm = values.get("algorithm")
    if isinstance(algorithm, str):
        values["algorithm"] = algorithm = {"preset": algorithm}
    if isinstance(algorithm, Mapping) and isinstance(algorithm.get("preset"), str):
        values = _merged(preset_values(algorithm["preset"]), values)
    return values


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` wins, key by key; what is not a mapping on both sides is replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def resolve_cache_tokens(values: Mapping[str, Any], default_max_tokens: int) -> dict[str, Any]:
    """`algorithm.overlong.cache_tokens: auto` as a number: a fifth of `rollout.max_tokens`."""
    try:
        overlong = values["algorithm"]["overlong"]
        if overlong["cache_tokens"] != "auto":
            return dict(values)
    except (KeyError, TypeError):  # not given, or of another shape, which the models refuse
        return dict(values)
    rollout = values.get("rollout")
    max_tokens = rollout.get("max_tokens", default_max_tokens) if isinstance(rollout, Mapping) else default_max_tokens
    cache = max_tokens // PAPER_CACHE_SHARE if isinstance(max_tokens, int) else 0
    return _merged(values, {"algorithm": {"overlong": {"cache_tokens": cache}}})
