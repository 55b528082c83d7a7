"""A small valid config and a model folder for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 6,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
QWEN3_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A checkpoint folder that looks complete: Llama with 9 heads, one character a token, two tiny shards."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    characters = [chr(code) for code in range(32, 95)] + ["\n"]
    tokenizer = Tokenizer(WordLevel({character: i for i, character in enumerate(characters)}, unk_token=" "))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    weight_map = {}
    for name, file in (
        ("a.weight", "model-00001-of-00002.safetensors"),
        ("b.weight", "model-00002-of-00002.safetensors"),
    ):
        save_file({name: np.ones((4, 4), np.float32)}, folder / file, metadata={"format": "pt"})
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_config(folder: Path, **sections: Any) -> Path:
    """A valid YAML config in `folder` with a model beside it; `sections` replace whole sections."""
    values = {
        "run": {"dir": str(folder / "run"), "steps": 4},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"arithmetic": {"task": "addition", "problems": 32}}, "max_prompt_tokens": 128},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 8},
        "training": {"mini_batch": 8, "micro_batch_tokens": 512},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values | sections))
    return path
