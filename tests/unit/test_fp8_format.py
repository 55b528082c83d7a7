"""FP8 on the way out: its numbers, and the plan of what travels in them. See also tests/unit/test_quantize.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.table import hf_shapes, parameter_table
from dapo_megatron.sync.fp8_format import Fp8Source, quantize_blocks
from dapo_megatron.sync.fp8_plan import fp8_plan, quantization_config, quantized_matrices, scale_name, scale_shape
from dapo_megatron.sync.plan import ServerLayout, TransferPlan, compile_plan
from tests.models import TINY, TINY_EXPERTS, TINY_LATENT


def architecture(folder: Path, config: type = LlamaConfig, **changes: Any) -> Architecture:
    """What a config.json says; there are no weights."""
    made = config(**TINY | {"vocab_size": 64} | changes)
    made.architectures = [config.__name__.replace("Config", "ForCausalLM")]
    made.save_pretrained(folder)
    return architecture_of(folder)


def plan_of(arch: Architecture, tensor: int = 1) -> TransferPlan:
    return compile_plan(arch, ParallelConfig(), 1, ServerLayout(tensor), dtype="bfloat16", bucket_bytes=1 << 20)


@pytest.mark.parametrize("shape", [(1, 1), (130, 100), (128, 300), (259, 257)])
def test_edges_of_a_matrix_have_blocks_of_their_own(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, shape[1] + 1)
    numbers, scales = quantize_blocks(matrix)
    assert numbers.shape == shape
    assert tuple(scales.shape) == scale_shape(shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            assert scales[row, column] == matrix[block].abs().max() / 448
            scale = scales[row, column]
            assert torch.allclose(numbers[block].float() * scale, matrix[block], rtol=1 / 16, atol=float(scale) / 1024)


def test_what_is_kept(tmp_path: Path) -> None:
    """Embeddings, norms, routers; what vLLM fuses together or not at all; experts whose widths do not fit."""
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    narrow_values = architecture(tmp_path / "a", **wide, head_dim=64, num_attention_heads=4, num_key_value_heads=1)
    layer = {name.removeprefix("model.layers.1.") for name in quantized_matrices(narrow_values) if ".1." in name}
    assert layer == {f"{name}.weight" for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    experts = {**TINY_EXPERTS, "head_dim": 64}
    narrow = architecture(tmp_path / "b", Qwen3MoeConfig, **wide, **experts)
    assert not any("experts" in name or "gate" in name for name in quantized_matrices(narrow))
    fitting = architecture(tmp_path / "c", Qwen3MoeConfig, **wide, **experts | {"moe_intermediate_size": 128})
    assert sum("experts" in name for name in quantized_matrices(fitting)) == 2 * 8 * 3
    assert not any(name.endswith("mlp.gate.weight") for name in quantized_matrices(fitting))
    with pytest.raises(UserError, match="fp8_block: no matrix of LlamaForCausalLM has widths that are multiples"):
        quantized_matrices(architecture(tmp_path / "d"))


def test_a_server_is_told_what_is_kept(tmp_path: Path) -> None:
    latent = TINY_LATENT | {"q_lora_rank": 128, "kv_lora_rank": 100, "hidden_size": 256, "moe_intermediate_size": 128}
    arch = architecture(tmp_path, DeepseekV3Config, **latent)
    config = quantization_config(arch)["quantization_config"]
    assert {key: config[key] for key in ("quant_method", "activation_scheme", "weight_block_size")} == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}  # fmt: skip
    ignored = set(config["ignored_layers"])
    # 116 rows of compressed keys and values do not fit, and vLLM fuses them with the queries'.
    names = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj")
    assert {f"model.layers.2.self_attn.{name}" for name in names} <= ignored
    assert {"lm_head", "model.embed_tokens", "model.norm", "model.layers.2.mlp.gate"} <= ignored
    quantized = quantized_matrices(arch)
    weights = {name for name in hf_shapes(arch) if name.endswith(".weight")}
    assert weights & {f"{path}.weight" for path in ignored} == weights - quantized


@pytest.mark.parametrize("tensor", [1, 2])
def test_plan_has_the_scales_behind_their_matrices(tmp_path: Path, tensor: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 2}
    arch = architecture(tmp_path, **sizes)
    matrices, plain = quantized_matrices(arch), plan_of(arch, tensor)
    made = fp8_plan(plain, matrices)
    assert [turn.sender for turn in made.turns] == [turn.sender for turn in plain.turns]
    assert made.groups == plain.groups
    for turn in made.turns:
        gathered = {name for row in turn.rows for name in row.hf_names}
        assert gathered == {stretch.name for bucket in turn.buckets for stretch in bucket.stretches}
    for before, after in zip(plain.buckets, made.buckets, strict=True):
        stretches = iter(after.stretches)
        for stretch in before.stretches:
            found = next(stretches)
            if stretch.name not in matrices:
                assert found == stretch
                continue
            assert found == stretch._replace(dtype="float8_e4m3fn")
            scales = next(stretches)
            assert (scales.name, scales.dtype, scales.dim) == (scale_name(stretch.name), "float32", stretch.dim)
            assert scales.shape == scale_shape(stretch.shape)
            assert (scales.start * 128, scales.stop * 128) == (stretch.start, stretch.stop)
        assert next(stretches, None) is None
    assert sum(b.nbytes for b in made.buckets) < 0.6 * sum(b.nbytes for b in plain.buckets)


def test_layout_that_cuts_a_block_is_refused(tmp_path: Path) -> None:
    arch = architecture(tmp_path, hidden_size=256, intermediate_size=384, head_dim=128, num_hidden_layers=1)
    matrices = quantized_matrices(arch)
    assert fp8_plan(plan_of(arch), matrices)
    with pytest.raises(
        UserError, match=r"fleet\.tensor cuts model\.layers\.0\.mlp\.gate_proj\.weight\[0:192 of dim 0\]"
    ):
        fp8_plan(plan_of(arch, 2), matrices)


def test_a_last_block_may_be_smaller(tmp_path: Path) -> None:
    """The rows of a layer that vLLM fuses with no other need not fill their last block, split or not."""
    arch = architecture(tmp_path / "a", hidden_size=192, intermediate_size=256, num_hidden_layers=1)
    matrices = quantized_matrices(arch)
    assert matrices == {"model.layers.0.mlp.down_proj.weight"}
    (scales,) = (s for b in fp8_plan(plan_of(arch), matrices).buckets for s in b.stretches if "scale" in s.name)
    assert (scales.shape, scales.dim, scales.start, scales.stop) == ((2, 2), 1, 0, 2)
    latent = TINY_LATENT | {"kv_lora_rank": 128, "v_head_dim": 24}
    arch = architecture(tmp_path / "b", DeepseekV3Config, **latent)  # 4 x (12 + 24) rows of keys and values
    made = fp8_plan(plan_of(arch), quantized_matrices(arch))
    (scales, *_) = (s for b in made.buckets for s in b.stretches if s.name.endswith("kv_b_proj.weight_scale_inv"))
    assert (scales.shape, scales.dim, scales.start, scales.stop) == ((2, 1), 0, 0, 2)


class Weights:
    """The tensors of a model, whole; rank 1 gathers with another and gets nothing."""

    def __init__(self, tensors: dict[str, Tensor], rank: int) -> None:
        self.tensors, self.rank, self.asked = tensors, rank, list[Parameter]()

    def gather(self, row: Parameter) -> list[Tensor] | None:
        self.asked.append(row)
        return [self.tensors[name] for name in row.hf_names] if self.rank == 0 else None


@pytest.mark.parametrize("rank", [0, 1])
def test_source_yields_what_the_rows_of_the_plan_name(tmp_path: Path, rank: int) -> None:
    arch = architecture(tmp_path, hidden_size=256, intermediate_size=256, head_dim=128, num_hidden_layers=1)
    tensors = {name: torch.randn(shape) for name, shape in hf_shapes(arch).items()}
    matrices = quantized_matrices(arch)
    weights = Weights(tensors, rank)
    source = Fp8Source(weights, arch, matrices)
    for turn in fp8_plan(plan_of(arch), matrices).turns:
        for row in turn.rows:
            found = source.gather(row)
            if rank:
                assert found is None
                continue
            assert found is not None
            for name, tensor in zip(row.hf_names, found, strict=True):
                if name in matrices:
                    assert torch.equal(tensor.view(torch.uint8), quantize_blocks(tensors[name])[0].view(torch.uint8))
                elif name in tensors:
                    assert tensor is tensors[name]
                else:
                    matrix = tensors[name.removesuffix("_scale_inv")]
                    assert torch.equal(tensor, quantize_blocks(matrix)[1])
    assert weights.asked == [replace(row) for row in parameter_table(arch)]
