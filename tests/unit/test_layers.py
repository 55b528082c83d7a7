"""Which modules layers are built of, what their parameters are called, and what is refused without them."""

from dataclasses import replace
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import MLPSubmodules
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture, LatentAttention, SigmoidRouter
from dapo_megatron.models.table import parameter_table
from dapo_megatron.trainer import device, layers, no_te
from dapo_megatron.trainer.attention import PackedCoreAttention, RMSNorm
from dapo_megatron.trainer.latent_attention import WholeLinear
from dapo_megatron.trainer.model_config import transformer_config
from dapo_megatron.trainer.parallel import Layout

SIZES = (2, 32, 4, 2, 8, 48, 64, 1e-6, 1e4, 128)
LLAMA = Architecture("LlamaForCausalLM", *SIZES, tied_embeddings=False, qkv_bias=False)
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
LATENT = LatentAttention(query_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, value_dim=10)
DEEPSEEK = replace(
    LLAMA,
    hf_class="DeepseekV3ForCausalLM",
    num_kv_heads=4,
    head_dim=20,
    latent=LATENT,
    sigmoid_router=SigmoidRouter(groups=1, groups_per_token=1, scale=2.5),
    dense_layers=1,
    shared_ffn_size=32,
    **EXPERTS,
)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, hf_class="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": replace(LLAMA, hf_class="Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": replace(LLAMA, hf_class="Qwen3MoeForCausalLM", qk_norm=True, **EXPERTS),
    "mixtral": replace(LLAMA, hf_class="MixtralForCausalLM", **EXPERTS),
    "gemma": replace(LLAMA, hf_class="GemmaForCausalLM", zero_centered_norms=True, activation="gelu_tanh"),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3_plain": replace(DEEPSEEK, latent=replace(LATENT, query_rank=None), dense_layers=0),
}
LAYERS = [(family, layer) for family in ARCHITECTURES for layer in ((0, 1) if family == "deepseek_v3" else (0,))]
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


def layer_spec(arch: Architecture, backend: layers.Backend, layer: int) -> Any:
    return layers.block_spec(arch, backend, range(layer, layer + 1)).layer_specs[0]


def built(arch: Architecture, spec: Any) -> Any:
    """A layer of megatron's own modules."""
    config: TransformerConfig = transformer_config(arch, ONE_RANK, LOCAL_FP32, "local")
    return build_module(spec, config=config, layer_number=1)


def table_names(arch: Architecture, layer: int = 0) -> set[str]:
    prefix = f"decoder.layers.{layer}."
    return {row.name.removeprefix(prefix) for row in parameter_table(arch) if row.layer == layer}


def stored_names(module: nn.Module) -> set[str]:
    """Names of a module's parameters and lasting buffers."""
    return {name for name in module.state_dict() if not name.endswith("_extra_state")}


@pytest.mark.parametrize(("family", "layer"), LAYERS)
def test_local_layer_has_the_tables_names(layout: Layout, family: str, layer: int) -> None:
    arch = ARCHITECTURES[family]
    assert stored_names(built(arch, layer_spec(arch, "local", layer))) == table_names(arch, layer)


@pytest.mark.parametrize(("family", "layer"), LAYERS)
def test_local_layer_is_ours_where_megatrons_cannot_pack(layout: Layout, family: str, layer: int) -> None:
    arch = ARCHITECTURES[family]
    module = built(arch, layer_spec(arch, "local", layer))
    attention = module.self_attention
    assert isinstance(attention.core_attention, PackedCoreAttention)
    norms = [module.input_layernorm, module.pre_mlp_layernorm]
    norms += [attention.q_layernorm, attention.k_layernorm] if arch.qk_norm else []
    if arch.latent:
        norms += [attention.kv_layernorm] + ([attention.q_layernorm] if arch.latent.query_rank else [])
        assert isinstance(attention.linear_kv_down_proj, WholeLinear)
        assert "linear_kv_down_proj._extra_state" in attention.state_dict()  # as of every linear of megatron's
    assert all(isinstance(norm, RMSNorm) for norm in norms)
    assert all(norm.eps == arch.norm_eps for norm in norms)
    assert all(norm.zero_centered is arch.zero_centered_norms for norm in norms)
    assert isinstance(getattr(module.mlp, "experts", None), SequentialMLP) == arch.has_experts(layer)


def test_layers_of_a_chunk_are_those_of_their_numbers() -> None:
    arch = replace(DEEPSEEK, num_layers=5, dense_layers=2)
    block = layers.block_spec(arch, "local", range(1, 5))
    assert block.layer_norm is RMSNorm
    assert [spec.submodules.mlp.module for spec in block.layer_specs] == [MLP, MoELayer, MoELayer, MoELayer]


def test_specs_are_not_shared_between_models() -> None:
    layer_spec(ARCHITECTURES["qwen3_moe"], "local", 0)
    keys = layer_spec(ARCHITECTURES["qwen3"], "local", 0).submodules.sharded_state_dict_keys_map
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


class WholeTELinear(Linear):
    """One that every rank has whole."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, parallel_mode: str, **_: Any) -> None:
        assert parallel_mode == "duplicated"
        super().__init__(inputs, outputs, bias=bias)


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

    def linear(self) -> type:
        return WholeTELinear

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
    monkeypatch.setattr(multi_latent_attention, "TELinear", WholeTELinear)


@pytest.mark.parametrize(("family", "layer"), LAYERS)
@pytest.mark.usefixtures("te")
def test_te_layer_has_the_names_that_the_tables_map_to(layout: Layout, family: str, layer: int) -> None:
    arch = ARCHITECTURES[family]
    assert layers.block_spec(arch, "te", range(2)).layer_norm is Norm
    prefix = f"decoder.layers.{layer}."
    rows = [row for row in parameter_table(arch) if row.layer == layer]
    mapped = {row.local_name(layer, row.expert, te=True).removeprefix(prefix) for row in rows}
    assert stored_names(built(arch, layer_spec(arch, "te", layer))) == mapped
    assert len(mapped) == len(table_names(arch, layer))


@pytest.mark.parametrize(("family", "layer"), LAYERS)
@pytest.mark.usefixtures("te")
def test_both_backends_save_norms_under_the_same_keys(layout: Layout, family: str, layer: int) -> None:
    """A run state of one backend is read by the other."""
    arch = ARCHITECTURES[family]

    def keys(spec: Any) -> set[str]:
        renamed = spec.submodules.sharded_state_dict_keys_map
        names = set()
        for name in stored_names(built(arch, spec)):
            for old, new in renamed.items():
                name = name.replace(old, new, 1) if name.startswith(old) else name
            names.add(name)
        return {name for name in names if ".experts." not in name}

    assert keys(layer_spec(arch, "local", layer)) == keys(layer_spec(arch, "te", layer))


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("qwen3_moe", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("qwen3_moe", "mlp.experts.local_experts.3.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"),
        ("qwen3", "self_attention.q_layernorm.weight", "self_attention.q_layernorm.weight"),
        ("deepseek_v3", "self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
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
    assert not any(layers.fusion_fields(LLAMA, "local", cuda=False, weight_gradient=False).values())
    assert not any(layers.fusion_fields(LLAMA, "local", cuda=False, weight_gradient=True).values())


@pytest.mark.parametrize("weight_gradient", [False, True])
def test_fusion_on_a_gpu(weight_gradient: bool) -> None:
    te = layers.fusion_fields(LLAMA, "te", cuda=True, weight_gradient=weight_gradient)
    local = layers.fusion_fields(LLAMA, "local", cuda=True, weight_gradient=weight_gradient)
    assert {name for name, on in te.items() if not on} == (
        set() if weight_gradient else {"gradient_accumulation_fusion"}
    )
    only_te = {name for name in te if te[name] and not local[name]}
    assert only_te == {"apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion"}


@pytest.mark.parametrize(("family", "off"), [("gemma", "bias_activation_fusion"), ("deepseek_v3", "apply_rope_fusion")])
def test_kernels_that_compute_something_else_are_not_used(family: str, off: str) -> None:
    fields = layers.fusion_fields(ARCHITECTURES[family], "te", cuda=True, weight_gradient=True)
    assert [name for name, on in fields.items() if not on] == [off]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fusion_fields_are_megatrons(family: str) -> None:
    arch = ARCHITECTURES[family]
    config = transformer_config(arch, ONE_RANK, LOCAL_FP32, "local")
    for name, on in layers.fusion_fields(arch, "local", cuda=False, weight_gradient=False).items():
        assert getattr(config, name) is on
