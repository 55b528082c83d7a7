"""What vLLM makes of weights in FP8 blocks: the layers it keeps, and the parameters that the pushed tensors fill.

vLLM has no kernels for them on a CPU, so that no server runs here; its own loaders do.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import BlockQuantScaleParameter

from dapo_megatron.models.registry import architecture_of
from dapo_megatron.sync.fp8_format import quantize_blocks
from dapo_megatron.sync.fp8_plan import quantization_config, quantized_matrices
from tests.models import TINY

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json of a model whose values are too narrow for blocks."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 12, "vocab_size": 64, "head_dim": 64}
    config = LlamaConfig(**TINY | sizes | {"num_key_value_heads": 1})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    return path


def test_overrides_make_the_model_quantised(folder: Path) -> None:
    overrides = quantization_config(architecture_of(folder))
    model = ModelConfig(model=str(folder), hf_overrides=overrides, skip_tokenizer_init=True, dtype="bfloat16")
    assert model.quantization == "fp8"
    assert model.hf_config.quantization_config == overrides["quantization_config"]


def test_vllm_keeps_exactly_the_kept_layers(folder: Path) -> None:
    arch = architecture_of(folder)
    config = Fp8Config.from_config(quantization_config(arch)["quantization_config"])
    assert config.is_checkpoint_fp8_serialized
    assert config.weight_block_size == [128, 128]
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    skipped = [
        f"model.layers.{i}.{name}"
        for i in range(12)
        for name in names
        if is_layer_skipped(f"model.layers.{i}.{name}", config.ignored_layers, FUSED)
    ]
    assert skipped == [f"model.layers.{i}.self_attn.qkv_proj" for i in range(12)]
    assert not any("q_proj" in name for name in quantized_matrices(arch))


@pytest.mark.parametrize("rank", [0, 1])
def test_pushed_tensors_fill_the_parameters_of_a_fused_layer(
    folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own loading of a gate and an up projection, and of their scales, on two tensor-parallel ranks."""
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 2)
    rows, columns, share = 512, 256, 256
    weight: Any = create_fp8_weight_parameter(2 * share, columns, weight_loader=None)
    stored: Any = create_fp8_scale_parameter(BlockQuantScaleParameter, [share] * 2, columns, [128, 128], None)
    stored.data.fill_(float("nan"))
    parts = [torch.randn(rows, columns, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for number, part in enumerate(parts):
        numbers, scales = quantize_blocks(part)
        for parameter, loaded, block in ((weight, numbers, 1), (stored, scales, 128)):
            size = share // block
            parameter.load_merged_column_weight(
                loaded_weight=loaded,
                shard_id=number,
                shard_offset=number * size,
                shard_size=size,
                tp_rank=rank,
                tp_size=2,
            )
    wanted = torch.cat([part[rank * share : (rank + 1) * share] for part in parts])
    numbers, scales = quantize_blocks(wanted)
    assert torch.equal(weight.data.view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(stored.data, scales)
