"""mbridge, another conversion between Hugging Face and Megatron, as a second opinion. Loads into our models."""

from pathlib import Path
from typing import Any

import torch

_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


def bridge(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """mbridge's converter for a Llama or Qwen2 checkpoint, in the process groups that are there.

    It knows Transformer Engine's names; where the layers are megatron-core's own, norms are modules by themselves.
    """
    from mbridge import AutoBridge
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    kind: Any = type(AutoBridge.from_config(config, dtype=dtype))

    class LocalLayers(kind):  # type: ignore[misc]
        def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
            parts = name.split(".")
            if parts[-2] in _NORMS and "layers" in parts:
                return [f"model.layers.{parts[2]}.{_NORMS[parts[-2]]}.weight"]
            names: list[str] = super()._weight_name_mapping_mcore_to_hf(name)
            return names

    return LocalLayers(config, dtype=dtype)
