"""Small models with a tokenizer, and prompts, for quantisation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor

from tests.models import TINY

LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:!?-"
# Widths that suit blocks of 128.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}

Change = Callable[[dict[str, Tensor]], object]


def write_model(folder: Path, name: str = "Llama", change: Change | None = None, **config: Any) -> Path:
    """A random fp32 model of transformers with a token for each of `LETTERS`; `change` may change its tensors."""
    import transformers

    torch.manual_seed(0)
    model_config = getattr(transformers, f"{name}Config")(
        **TINY | {"vocab_size": len(LETTERS), "initializer_range": 0.08} | config
    )
    getattr(transformers, f"{name}ForCausalLM")(model_config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="-"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    if change:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_prompts(file: Path) -> Path:
    """15 lines of 24 letters."""
    numbers = torch.randint(len(LETTERS) - 1, (15, 24), generator=torch.Generator().manual_seed(0))
    file.write_text("\n".join("".join(LETTERS[i] for i in row) for row in numbers.tolist()))
    return file
