"""The weights that a model starts from, in whichever form its folder has them."""

from pathlib import Path
from typing import Protocol

import torch

from dapo_megatron.checkpoint import is_megatron
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.journal import JOURNALS
from dapo_megatron.checkpoint.megatron import MegatronReader
from dapo_megatron.errors import UserError
from dapo_megatron.models.sharding import Reader


class WeightReader(Reader, Protocol):
    """A checkpoint's tensors under Hugging Face's names."""

    def names(self) -> list[str]:
        """Names of all tensors."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""


def open_weights(folder: str | Path) -> WeightReader:
    """The weights in a Hugging Face folder or in a Megatron checkpoint: a converted one or a run's saved state.

    Of a saved state these are the model's weights in the precision it was trained in, not the optimizer's fp32 ones:
    those continue a run, these start another.

    Raises:
        UserError: if the folder holds no weights, they are damaged, or a conversion into it did not finish.
    """
    if any(Path(folder).glob(JOURNALS)):
        raise UserError(f"{folder} is what an interrupted conversion left: start that again")
    return MegatronReader(folder) if is_megatron(folder) else HFReader(folder)
