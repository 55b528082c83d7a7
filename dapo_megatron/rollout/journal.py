"""The batches of a run on disk, one file a step, to be replayed."""

from pathlib import Path

from dapo_megatron.errors import UserError
from dapo_megatron.files import write_atomically
from dapo_megatron.rollout.blocks import BatchTokens, decode_batch, encode_batch
from dapo_megatron.types import BatchHeader


class Journal:
    """Recorded batches in `folder`, as step_000001.npz and so on."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        """File of a step's batch."""
        return self.folder / f"step_{step:06d}.npz"

    def write(self, header: BatchHeader, tokens: BatchTokens) -> None:
        """Record a batch. A crash at any point leaves the whole file or none; an earlier record is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(header.step), encode_batch(header, tokens))

    def read(self, step: int) -> tuple[BatchHeader, BatchTokens]:
        """The batch recorded for a step.

        Raises:
            UserError: when there is none, or the file is damaged.
        """
        path = self.path(step)
        try:
            return decode_batch(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"rollout.replay: {self.folder} holds no batch of step {step} ({path.name})") from None
        except ValueError as error:
            raise UserError(f"rollout.replay: {path} is damaged: {error}") from error
