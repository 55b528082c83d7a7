"""torchrun with exit codes: what `dapo-megatron train` becomes after its checks.

torchrun itself turns every failure into exit code 1 and a traceback of its own. Here the exit code of the rank that
failed first is kept (2: a user error that rank 0 has already explained), a signal ends with 128 + its number
(Ctrl-C: 130), and a rank that was killed is named in one line.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun's command line and return the exit code that tells what happened."""
    logging.disable(logging.ERROR)  # torchrun's own accounts of what is said here in a line or less
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        return _failed_rank(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _failed_rank(error: ChildFailedError) -> int:
    """Exit code of the rank that failed first. A rank killed by a signal could not explain itself: do it here."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = "; the machine may be out of memory" if -failure.exitcode == signal.SIGKILL else ""
        print(f"dapo-megatron: rank {rank} was ended by {name}{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    return failure.exitcode


if __name__ == "__main__":
    sys.exit(main())
