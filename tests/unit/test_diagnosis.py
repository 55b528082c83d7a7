"""Warnings about a step, and that both consoles show them."""

import io
from typing import Any

import pytest
from rich.console import Console

from dapo_megatron.monitoring.console import LiveConsole, PlainConsole
from dapo_megatron.monitoring.diagnosis import warnings_of

HEALTHY: dict[str, Any] = {"step": 3, "kept": 16.0, "exhausted": 0.0, "skipped": 0.0, "first_log_ratio": 1e-3}


def test_healthy_step_has_none() -> None:
    assert warnings_of(HEALTHY) == []


def test_older_weights_are_no_fault_by_themselves() -> None:
    """Asynchronous steps have them, and the bound holds or the run ends; NaN is of a step without tokens."""
    assert warnings_of(HEALTHY | {"staleness": 1.5, "off_policy_tokens": 1.0, "stale_masked": 0.5}) == []
    assert warnings_of(HEALTHY | {"stale_masked": float("nan")}) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"exhausted": 1.0, "kept": 5.0}, "step 3: the sampling budget was used up, trained on the 5 groups kept"),
        ({"exhausted": 1.0, "skipped": 1.0, "kept": 0.0}, "step 3 was skipped"),
        ({"first_log_ratio": 2e-3}, "step 3: the first update did not start on-policy, mean |log r| = 2.0e-03"),
        ({"stale_masked": 0.61}, "step 3: 61% of the tokens were too old and left the loss"),
        ({"failed": 2.0}, "step 3: 2 groups were dropped"),
    ],
)
def test_each_fault_is_one_warning(change: dict[str, float], text: str) -> None:
    (warning,) = warnings_of(HEALTHY | change)
    assert warning.startswith(text)


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
def test_consoles_show_warnings(kind: type[PlainConsole] | type[LiveConsole]) -> None:
    output = io.StringIO()
    console = kind(Console(file=output, width=200))
    try:
        console.step(HEALTHY | {"exhausted": 1.0})
    finally:
        console.close()
    assert "warning: step 3: the sampling budget was used up" in output.getvalue()
