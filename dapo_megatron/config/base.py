"""What every config section shares: no unknown keys, no silent type coercion of nonsense."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A config section. Unknown keys are errors; values are validated again on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
