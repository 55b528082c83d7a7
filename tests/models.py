"""Small models for tests: tiny random ones made with transformers, and the real SmolLM2-135M."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parent.parent

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TINY_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
ROUTER_SCALE = 16  # times transformers' 0.02: a layout's rounding must not choose other experts


def tiny_model(folder: Path, family: str, *, tied: bool = True, vocab: int = 192, seed: int = 0) -> Path:
    """Write a random fp32 checkpoint of the size `TINY`. `family` is "llama", "qwen2", "qwen3" or "qwen3_moe"."""
    import transformers

    model_name, extra = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", {"head_dim": 16}),
        "qwen3_moe": ("Qwen3Moe", {"head_dim": 16} | TINY_EXPERTS),
    }[family]
    config_class, model_class = (getattr(transformers, f"{model_name}{kind}") for kind in ("Config", "ForCausalLM"))
    torch.manual_seed(seed)
    model = model_class(
        config_class(
            **TINY,
            **extra,
            vocab_size=vocab,
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
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(ROUTER_SCALE)
    model.save_pretrained(folder)
    return folder


def smollm2() -> Path:
    """The SmolLM2-135M checkpoint of `make model` (or `$DAPO_TEST_MODEL`), made now where it is missing."""
    folder = Path(os.environ.get("DAPO_TEST_MODEL", REPOSITORY / "models" / "SmolLM2-135M"))
    if not folder.exists():
        subprocess.run([sys.executable, REPOSITORY / "tools" / "prepare_smollm2.py", folder], check=True, timeout=300)
    return folder
