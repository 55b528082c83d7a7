"""A tiny random model with everything a server needs, and the reference that servers are compared with."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.models import TINY, TINY_EXPERTS

END = 256
PAD = 257
VOCABULARY = 258  # not a multiple of the 64 that vLLM pads it to


def write_tiny_model(folder: Path, *, experts: bool = False) -> Path:
    """A two-layer model with tied embeddings and grouped-query attention, fp32, over bytes.

    Qwen2 with its biases, or Qwen3-MoE with 8 experts of which each token passes through two.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|pad|>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>").save_pretrained(folder)
    torch.manual_seed(0)
    config_class, model_class = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen2Config, Qwen2ForCausalLM)
    config = config_class(
        **TINY | {"hidden_size": 128, "num_hidden_layers": 2},
        **TINY_EXPERTS | {"head_dim": 32} if experts else {},
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        initializer_range=0.2,
    )
    model = model_class(config)
    add_noise(model, 0.2, seed=0)  # transformers starts biases at zero and norms at one: mistakes would not show
    # What a published model's folder may ask for; a server that followed it would fail every comparison.
    model.generation_config = GenerationConfig(do_sample=True, top_k=3, repetition_penalty=1.5, eos_token_id=END)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    """The model of `folder` in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def add_noise(model: PreTrainedModel, share: float, seed: int) -> None:
    """Adds normal noise of `share` of each parameter's own spread (its mean size where it has none)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.std() if parameter.std() > 0 else parameter.abs().mean() + 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * share)


def weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Hugging Face names and tensors; the tied output matrix stands once."""
    return list(model.named_parameters())


@torch.no_grad()
def log_probs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of the response's tokens, float32 [T]."""
    logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return logits.log_softmax(-1)[positions, torch.tensor(response)]
