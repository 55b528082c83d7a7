"""Small models for tests: tiny random ones made with transformers, and the real SmolLM2-135M."""

import os
import subprocess
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parent.parent


def tiny_model(folder: Path, family: str, *, tied: bool = True, vocab: int = 192, seed: int = 0) -> Path:
    """Write a random fp32 checkpoint of 4 layers, 4 heads, 2 KV heads. `family` is "llama" or "qwen2"."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    torch.manual_seed(seed)
    model = model_class(
        config_class(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rope_theta=10000.0,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.no_grad():  # transformers starts biases at zero and norms at one: wrong handling would not show
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def smollm2() -> Path:
    """The SmolLM2-135M checkpoint of `make model` (or `$DAPO_TEST_MODEL`), made now where it is missing."""
    folder = Path(os.environ.get("DAPO_TEST_MODEL", REPOSITORY / "models" / "SmolLM2-135M"))
    if not folder.exists():
        subprocess.run([sys.executable, REPOSITORY / "tools" / "prepare_smollm2.py", folder], check=True, timeout=300)
    return folder
