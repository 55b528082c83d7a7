"""Run synchronous and asynchronous pipelines over several seeds and tell whether the latter are as good.

    python -m examples.staleness.run --seeds 5 --jobs 1 --out runs/staleness

Options, and what a second start does, are those of `examples.ablation.run`. Results: OUT/staleness.md and .json.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from examples.ablation.run import BASE, parse, run_and_report
from examples.staleness.report import write

ARMS = Path(__file__).parent / "arms.yaml"


def main(arguments: Sequence[str] | None = None, base: Path = BASE, arms: Path = ARMS) -> int:
    """Exit codes of `run_and_report`."""
    options = parse(arguments, "Compare pipelines with the synchronous one.", Path("runs/staleness"))
    return run_and_report(options, base, arms, write)


if __name__ == "__main__":
    sys.exit(main())
