"""What tests of several ranks share."""

from collections.abc import Iterator

import pytest

from tests.distributed.launch import Launcher


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Launcher]:
    """Runs worker modules on ranks. All of its processes end with the tests."""
    launcher = Launcher()
    yield launcher
    launcher.close()
