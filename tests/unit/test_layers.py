"""Which modules layers are built of, what their parameters are called, and what is refused without them."""

from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.table import parameter_table
from dapo_megatron.trainer import device, layers, no_te
from dapo_megatron.trainer.attention import PackedCoreAttention, RMSNorm
from dapo_megatron.trainer.build import transformer_config
from dapo_megatron.trainer.parallel import Layout

SIZES = (2, 32, 4, 2, 8, 48, 64, 1e-6, 1e4, 128)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", *SIZES, tied_embeddings=False, qkv_bias=False),
    "qwen2": Architecture("Qwen2ForCausalLM", *SIZES, tied_embeddings=False, qkv_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", *SIZES, tied_embeddings=False, qkv_bias=False, qk_norm=True),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        *SIZES,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_size=16,
    ),
}
LOCAL_FP32 = TrainingConfig.model_validate({"precision": "fp32"})
ONE_RANK = ParallelConfig.model_validate({})


# --- the choice --------------------------------------------------------------------------------------------------


def choose(monkeypatch: pytest.MonkeyPatch, *, cuda: bool, te: bool, **training: Any) -> layers.Backend:
    monkeypatch.setattr(device, "has_cuda", lambda: cuda)
    monkeypatch.setattr(no_te, "has_te", lambda: te)
    return layers.resolve_backend(TrainingConfig.model_validate(training))


@pytest.mark.parametrize(
    ("cuda", "te", "training", "expected"),
    [
        (True, True, {}, "te"),
        (True, True, {"layer_backend": "te"}, "te"),
        (True, True, {"layer_backend": "local"}, "local"),
        (True, True, {"precision": "fp8"}, "te"),
        (True, True, {"precision": "fp32"}, "local"),
        (True, False, {}, "local"),
        (False, True, {}, "local"),
        (False, False, {"precision": "fp16"}, "local"),
    ],
)
def test_backend(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, te: bool, training: dict[str, Any], expected: str
) -> None:
    assert choose(monkeypatch, cuda=cuda, te=te, **training) == expected


@pytest.mark.parametrize(
    ("cuda", "te", "training", "expected"),
    [
        (True, False, {"layer_backend": "te"}, r"layer_backend=te needs Transformer Engine: run `pip install"),
        (False, True, {"layer_backend": "te"}, r"on a machine with CUDA.*; or use auto or local"),
        (
            True,
            False,
            {"precision": "fp8"},
            r"precision=fp8 needs .* run `pip install .* or use training.precision=bf16",
        ),
        (True, True, {"precision": "fp8", "layer_backend": "local"}, r"layers: use training\.layer_backend=auto$"),
    ],
)
def test_backend_refused(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, te: bool, training: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        choose(monkeypatch, cuda=cuda, te=te, **training)


# --- local layers ------------------------------------------------------------------------------------------------


def table_names(arch: Architecture, layer: int = 0) -> set[str]:
    prefix = f"decoder.layers.{layer}."
    return {row.name.removeprefix(prefix) for row in parameter_table(arch) if row.layer == layer}


def parameter_names(arch: Architecture, spec: Any) -> set[str]:
    """Names of a layer's parameters, built with megatron's own modules."""
    config: TransformerConfig = transformer_config(arch, ONE_RANK, LOCAL_FP32, "local")
    return {name for name, _ in build_module(spec, config=config, layer_number=1).named_parameters()}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_local_layer_has_the_tables_names(layout: Layout, family: str) -> None:
    arch = ARCHITECTURES[family]
    assert parameter_names(arch, layers.local_layer_spec(arch)) == table_names(arch)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_local_layer_is_ours_where_megatrons_cannot_pack(layout: Layout, family: str) -> None:
    arch = ARCHITECTURES[family]
    block = layers.block_spec(arch, "local", 3)
    assert len(block.layer_specs) == 3
    assert block.layer_norm is RMSNorm
    config = transformer_config(arch, ONE_RANK, LOCAL_FP32, "local")
    layer = build_module(block.layer_specs[0], config=config, layer_number=1)
    attention = layer.self_attention
    assert isinstance(attention.core_attention, PackedCoreAttention)
    norms = [layer.input_layernorm, layer.pre_mlp_layernorm]
    norms += [attention.q_layernorm, attention.k_layernorm] if arch.qk_norm else []
    assert all(isinstance(norm, RMSNorm) for norm in norms)
    assert all(norm.eps == arch.norm_eps for norm in norms)
    assert isinstance(getattr(layer.mlp, "experts", None), SequentialMLP) == (arch.num_experts > 0)


def test_specs_are_not_shared_between_models() -> None:
    layers.local_layer_spec(ARCHITECTURES["qwen3_moe"])
    keys = layers.local_layer_spec(ARCHITECTURES["qwen3"]).submodules.sharded_state_dict_keys_map
    assert keys["pre_mlp_layernorm."] == "mlp.linear_fc1.layer_norm_"


# --- Transformer Engine's layers, with stand-ins of its modules ----------------------------------------------------


class Linear(nn.Module):
    """Parameters of a Transformer Engine linear: weight, perhaps a bias."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None


class NormLinear(Linear):
    """With the norm in front of it."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs))


class GroupedLinear(nn.Module):
    """One numbered weight per local expert."""

    def __init__(self, num_gemms: int, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        for i in range(num_gemms):
            setattr(self, f"weight{i}", nn.Parameter(torch.empty(outputs, inputs)))


class Norm(nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))


class Core(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()


class Grouped(nn.Module):
    """Experts in two grouped linears."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: MLPSubmodules, **_: Any) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = submodules.linear_fc1(num_local_experts, hidden, 2 * ffn)
        self.linear_fc2 = submodules.linear_fc2(num_local_experts, ffn, hidden)


class Provider:
    """The answers of megatron's TESpecProvider, of modules that can be built without Transformer Engine."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormLinear

    def column_parallel_linear(self) -> type:
        return Linear

    def row_parallel_linear(self) -> type:
        return Linear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return Core

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, grouped: bool, legacy: bool) -> tuple[type, MLPSubmodules]:
        assert grouped
        assert not legacy
        return Grouped, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", Provider, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", Norm, raising=False)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.usefixtures("te")
def test_te_layer_has_the_names_that_the_tables_map_to(layout: Layout, family: str) -> None:
    arch = ARCHITECTURES[family]
    block = layers.block_spec(arch, "te", 2)
    assert block.layer_norm is Norm
    names = parameter_names(arch, block.layer_specs[0])
    prefix = "decoder.layers.0."
    rows = [row for row in parameter_table(arch) if row.layer == 0]
    mapped = {row.local_name(0, row.expert, te=True).removeprefix(prefix) for row in rows}
    assert names == mapped
    assert len(mapped) == len(table_names(arch))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.usefixtures("te")
def test_both_backends_save_norms_under_the_same_keys(layout: Layout, family: str) -> None:
    """A run state of one backend is read by the other."""
    arch = ARCHITECTURES[family]

    def keys(spec: Any) -> set[str]:
        renamed = spec.submodules.sharded_state_dict_keys_map
        names = set()
        for name in parameter_names(arch, spec):
            for old, new in renamed.items():
                name = name.replace(old, new, 1) if name.startswith(old) else name
            names.add(name)
        return {name for name in names if "norm" in name}

    assert keys(layers.local_layer_spec(arch)) == keys(layers.te_layer_spec(arch))


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("qwen3_moe", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("qwen3_moe", "mlp.experts.local_experts.3.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"),
        ("qwen3", "self_attention.q_layernorm.weight", "self_attention.q_layernorm.weight"),
    ],
)
def test_te_names(family: str, name: str, expected: str) -> None:
    """In a chunk whose layers begin at number 1 and whose experts begin at number 2."""
    rows = {row.name: row for row in parameter_table(ARCHITECTURES[family])}
    row = rows[f"decoder.layers.1.{name}"]
    expert = None if row.expert is None else row.expert - 2
    assert row.local_name(0, expert, te=True) == f"decoder.layers.0.{expected}"
    outside = rows["decoder.final_layernorm.weight"]
    assert outside.local_name(None, None, te=True) == outside.name


# --- packed sequences --------------------------------------------------------------------------------------------


def test_te_packed() -> None:
    packed = layers.te_packed([8, 24, 4], torch.device("cpu"))
    assert packed.qkv_format == "thd"
    for ends in (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
        assert ends.tolist() == [0, 8, 32, 36]
        assert ends.dtype == torch.int32
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (24, 24)


# --- fused kernels -----------------------------------------------------------------------------------------------


def test_no_fusion_on_a_cpu() -> None:
    assert not any(layers.fusion_fields("local", cuda=False, weight_gradient=False).values())
    assert not any(layers.fusion_fields("local", cuda=False, weight_gradient=True).values())


@pytest.mark.parametrize("weight_gradient", [False, True])
def test_fusion_on_a_gpu(weight_gradient: bool) -> None:
    te = layers.fusion_fields("te", cuda=True, weight_gradient=weight_gradient)
    local = layers.fusion_fields("local", cuda=True, weight_gradient=weight_gradient)
    assert {name for name, on in te.items() if not on} == (
        set() if weight_gradient else {"gradient_accumulation_fusion"}
    )
    only_te = {name for name in te if te[name] and not local[name]}
    assert only_te == {"apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion"}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fusion_fields_are_megatrons(family: str) -> None:
    arch = ARCHITECTURES[family]
    config = transformer_config(arch, ONE_RANK, LOCAL_FP32, "local")
    for name, on in layers.fusion_fields("local", cuda=False, weight_gradient=False).items():
        assert getattr(config, name) is on
