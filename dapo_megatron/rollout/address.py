"""How a controller is found and opened: what its process and the trainer's must agree on."""

from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "DAPO_CONTROLLER_TOKEN"
"""Environment variable with the token that clients must send."""

PARENT_VARIABLE = "DAPO_CONTROLLER_PARENT"
"""Environment variable with the id of the process that the controller must not outlive."""


@dataclass(frozen=True)
class Address:
    """Where a controller is, the token that opens it, and its log."""

    url: str
    token: str
    log_path: Path
