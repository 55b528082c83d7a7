"""Weight versions: counted from 0, carried through vLLM as labels."""

import re

# Version of the weights that a server loaded from disk, before any push, and vLLM's label for them.
INITIAL_VERSION = 0
INITIAL_LABEL = "default"


def parse_version(label: str) -> int:
    """Weight version of vLLM's `label`; ValueError if it is not one that a push of ours set."""
    if label == INITIAL_LABEL:
        return INITIAL_VERSION
    if not re.fullmatch(r"[0-9]{1,9}", label):
        raise ValueError(f"{label[:20]!r} is no weight version")
    return int(label)
