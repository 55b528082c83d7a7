"""All config keys in one list: for error messages and for docs/configuration.md.

`python -m dapo_megatron.config.reference > docs/configuration.md` writes the page.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dapo_megatron.config.base import Section
from dapo_megatron.config.run import Config

HEADER = """# Configuration

A run reads one YAML file; `KEY=VALUE` arguments after it replace single values, for example
`dapo-megatron train run.yaml rollout.samples_per_prompt=16`. Values are written as in YAML: `fleet.port=null`,
`'rollout.stop=["\\n"]'`. Relative paths are relative to the current directory. `--dry-run` checks everything that can
be checked before a process starts, and prints the resolved configuration and the plan.

This page is generated from the models in `dapo_megatron/config`: `make docs`.
"""

_TYPE_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "true or false"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Key:
    """One key of the configuration. `default` is None when the key must be given, else YAML text."""

    name: str
    type: str
    default: str | None
    description: str


def config_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """Every key below `section` in the order of the models, sections that may be null included."""
    for name, field in section.model_fields.items():
        nested = _nested_section(field.annotation)
        dotted = f"{prefix}{field.alias or name}"
        if nested is None:
            yield Key(dotted, _type_text(field), _default_text(field), field.description or "")
            continue
        if NoneType in get_args(field.annotation):
            yield Key(dotted, "section or null", _default_text(field), field.description or "")
        yield from config_keys(nested, f"{dotted}.")


def markdown() -> str:
    """The text of docs/configuration.md."""
    lines = [HEADER]
    for name, field in Config.model_fields.items():
        section = _nested_section(field.annotation)
        assert section is not None, f"{name} of Config is not a section"
        lines += [f"## {name}", "", (section.__doc__ or "").strip(), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(key) for key in config_keys(section, f"{name}.")]
        lines.append("")
    return "\n".join(lines)


def _row(key: Key) -> str:
    default = "required" if key.default is None else f"`{key.default}`"
    meaning = key.description.replace("|", r"\|")
    return f"| `{key.name}` | {key.type} | {default} | {meaning} |"


def _nested_section(annotation: Any) -> type[Section] | None:
    """The section class in `Section` or `Section | None`, else None."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def _type_text(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(rule, name)
    ]
    text, null, _ = _annotation_text(field.annotation).partition(" or null")
    return " ".join([text, ", ".join(bounds)]).strip() + null


def _annotation_text(annotation: Any) -> str:
    """`int | None` -> "integer or null", `Literal["a", "b"]` -> "`a` or `b`"."""
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    if annotation is NoneType:
        return "null"
    options = get_args(annotation)
    if get_origin(annotation) is list:
        return f"list of {_annotation_text(options[0])}s"
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{option}`" for option in options)
    return " or ".join(_annotation_text(option) for option in options)


def _default_text(field: FieldInfo) -> str | None:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return None
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


if __name__ == "__main__":
    print(markdown(), end="")
