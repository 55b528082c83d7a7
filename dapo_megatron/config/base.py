"""What every config section shares: no unknown keys, no silent type coercion of nonsense."""

import json

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A config section. Unknown keys are errors; values are validated again on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


def as_yaml(value: object) -> str:
    """A value as a user writes it, for messages; of a section only that it is one."""
    if isinstance(value, Section):
        return "a section"
    return value if isinstance(value, str) else json.dumps(value)
