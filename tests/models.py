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
# Scaling that acts within the lengths of tests, on some pairs of dimensions wholly, on some in part.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
TINY_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
# Name: (transformers' name, what its config has beside TINY, the scaling of rotary positions).
TINY_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama3": ("Llama", {}, LLAMA3_ROPE),
    "mistral": ("Mistral", {"sliding_window": None}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16} | TINY_EXPERTS, {}),
    "mixtral": ("Mixtral", {"num_local_experts": 12, "rms_norm_eps": 1e-6}, {}),
    "gemma": ("Gemma", {"head_dim": 24}, {}),
    "deepseek_v3": ("DeepseekV3", TINY_LATENT, YARN_ROPE),
    # Queries from the hidden state, positions as they are, experts in every layer and in no groups.
    "deepseek_v3_plain": (
        "DeepseekV3",
        TINY_LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        {},
    ),
}
ROUTER_SCALE = 16  # times transformers' 0.02: a layout's rounding must not choose other experts


def tiny_model(folder: Path, family: str, *, tied: bool = True, vocab: int = 192, seed: int = 0) -> Path:
    """Write a random fp32 checkpoint of the size `TINY`. `family` is one of `TINY_FAMILIES`."""
    import transformers

    model_name, extra, scaling = TINY_FAMILIES[family]
    config_class, model_class = (getattr(transformers, f"{model_name}{kind}") for kind in ("Config", "ForCausalLM"))
    torch.manual_seed(seed)
    config = TINY | extra
    model = model_class(
        config_class(
            **config,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | scaling,
            vocab_size=vocab,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with torch.no_grad():  # transformers starts biases at zero and norms at one: wrong handling would not show
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias") or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if name.endswith("mlp.gate.weight"):
                tensor.mul_(ROUTER_SCALE)
    model.save_pretrained(folder)
    return folder


def smollm2() -> Path:
    """The SmolLM2-135M checkpoint of `make model` (or `$DAPO_TEST_MODEL`), made now where it is missing."""
    folder = Path(os.environ.get("DAPO_TEST_MODEL", REPOSITORY / "models" / "SmolLM2-135M"))
    if not folder.exists():
        subprocess.run([sys.executable, REPOSITORY / "tools" / "prepare_smollm2.py", folder], check=True, timeout=300)
    return folder
