"""From a Hugging Face checkpoint to a Megatron model and back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_helpers import LLAMA, QWEN3_MOE
from safetensors.torch import load_file

from dapo_megatron.checkpoint.export import export_hf
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.registry import SUPPORTED_ARCHITECTURES, architecture_of
from dapo_megatron.trainer.build import build_model, load_weights
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from tests.against_transformers import check_log_probs
from tests.batches import make_config
from tests.models import TINY_FAMILIES

VARIANTS = [(family, tied) for family in TINY_FAMILIES for tied in (True, False)]

EXPERTS = {  # how many, active, of which size, and the size of the shared ones
    "qwen3_moe": (8, 2, 48, 0),
    "mixtral": (12, 2, 96, 0),
    "deepseek_v3": (12, 4, 24, 48),
    "deepseek_v3_plain": (12, 4, 24, 48),
}

QWEN3 = QWEN3_MOE | {"architectures": ["Qwen3ForCausalLM"]}


def architecture(folder: Path, base: dict[str, Any] = LLAMA, **changes: Any) -> Architecture:
    """The architecture of a config.json with changes; a change to None removes the key."""
    config = {key: value for key, value in (base | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return architecture_of(folder)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_architecture_of_a_checkpoint(checkpoint: Callable[..., Path], family: str, tied: bool) -> None:
    arch = architecture_of(checkpoint(family, tied=tied))
    assert (arch.num_layers, arch.hidden_size, arch.ffn_size, arch.vocab_size) == (4, 64, 96, 151)
    latent = family.startswith("deepseek")
    assert (arch.num_heads, arch.num_kv_heads) == (4, 4 if latent else 2)
    assert arch.head_dim == (28 if latent else 24 if family == "gemma" else 16)
    assert (arch.value_dim, arch.rotary_dim) == ((20, 16) if latent else (arch.head_dim, arch.head_dim))
    assert (arch.norm_eps, arch.rope_theta, arch.max_positions) == (1e-6, 10000.0, 512)
    assert arch.tied_embeddings is tied
    assert arch.qkv_bias is (family == "qwen2")
    assert arch.qk_norm is family.startswith("qwen3")
    experts = (arch.num_experts, arch.experts_per_token, arch.expert_ffn_size, arch.shared_ffn_size)
    assert experts == EXPERTS.get(family, (0, 0, 0, 0))
    assert [arch.has_experts(layer) for layer in range(5)] == [family in EXPERTS] * 5 or family == "deepseek_v3"
    assert arch.uniform_layers is (family != "deepseek_v3")
    assert arch.has_dense_layers is (family not in EXPERTS or family == "deepseek_v3")
    assert arch.hf_class in SUPPORTED_ARCHITECTURES


def test_vocabulary_is_padded_to_equal_parts(tmp_path: Path) -> None:
    arch = architecture(tmp_path, vocab_size=151)
    assert [arch.padded_vocab(size) for size in (1, 2, 3, 8)] == [151, 152, 153, 152]


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
    ],
)
def test_rotary_base(tmp_path: Path, changes: dict[str, Any], theta: float) -> None:
    assert architecture(tmp_path, **changes).rope_theta == theta


def test_optional_keys(tmp_path: Path) -> None:
    arch = architecture(tmp_path, num_key_value_heads=None, head_dim=16)
    assert arch.num_kv_heads == 9
    assert arch.head_dim == 16
    assert not arch.tied_embeddings


def test_optional_keys_of_qwen3(tmp_path: Path) -> None:
    assert architecture(tmp_path, QWEN3).head_dim == 16  # not hidden / heads = 8
    assert architecture(tmp_path, QWEN3_MOE, norm_topk_prob=None).norm_topk_prob is False  # transformers' default
    assert architecture(tmp_path, QWEN3_MOE, num_experts=None, num_local_experts=4).num_experts == 4
    assert architecture(tmp_path, QWEN3_MOE, num_experts_per_tok=1, norm_topk_prob=False).experts_per_token == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "names the architecture MambaForCausalLM; supported are DeepseekV3"),
        ({"architectures": None}, r"names the architecture \(none\)"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_type='yarn' is not supported: use"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None is not supported: it must"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=.* is not supported: .* dequantise"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window=True is not"),
        ({"vocab_size": None}, "the key 'vocab_size' is missing"),
    ],
)
def test_what_megatron_would_silently_not_do_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        architecture(tmp_path, **changes)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN3, {"attention_bias": True}, "attention_bias=True is not supported"),
        (QWEN3, {"head_dim": None}, "head_dim=None is not supported: Qwen3 must state it"),
        (QWEN3, {"num_key_value_heads": None}, "num_key_value_heads=None is not supported"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types=\[.* is not supported"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias=True is not supported"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: every layer must have"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts=0 is not supported: it must be a number of at least 1"),
        (QWEN3_MOE, {"num_experts": None}, "num_experts=None is not supported"),
        (QWEN3_MOE, {"num_local_experts": 0}, "num_local_experts=0 is not supported"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size=None is not supported"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not supported: there are 8 experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported: a single expert's weight"),
    ],
)
def test_what_is_refused_of_qwen3(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        architecture(tmp_path, base, **changes)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_damaged_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.json"):
        architecture_of(tmp_path)


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        architecture_of(tmp_path / "missing")


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_log_probs_equal_those_of_transformers(
    layout: Layout, checkpoint: Callable[..., Path], family: str, tied: bool
) -> None:
    check_log_probs(checkpoint(family, tied=tied), layout)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_round_trip_is_byte_exact(
    layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path, family: str, tied: bool
) -> None:
    folder = checkpoint(family, tied=tied)
    config = make_config(folder, run={"dir": str(tmp_path)})
    export_hf(config, Policy(config, layout))
    original, exported = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == tensor.dtype
        assert np.array_equal(exported[name].numpy().view(np.int32), tensor.numpy().view(np.int32)), name
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "hf"))
    assert after == before


def test_transformers_loads_an_export_in_bf16(layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(checkpoint(), run={"dir": str(tmp_path)}, training={"precision": "bf16"})
    export_hf(config, Policy(config, layout))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    original = load_file(checkpoint() / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, original[name].bfloat16()), name


@pytest.mark.parametrize("ffn_size", [48, 128])
@pytest.mark.usefixtures("layout")
def test_tensor_of_another_shape_is_refused(checkpoint: Callable[..., Path], ffn_size: int) -> None:
    folder = checkpoint()
    arch = replace(architecture_of(folder), ffn_size=ffn_size)
    (model,) = build_model(arch, ParallelConfig.model_validate({}), make_config(folder).training, temperature=1.0)
    with pytest.raises(UserError, match=rf"gate_proj\.weight has the shape \(96, 64\), but .* \({ffn_size}, 64\)"):
        load_weights(model, HFReader(folder))
