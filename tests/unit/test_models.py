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
from torch import Tensor

from dapo_megatron.checkpoint.export import export_hf
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.config.training import ParallelConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.registry import SUPPORTED_ARCHITECTURES, architecture_of
from dapo_megatron.trainer.build import build_model, load_weights
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.ranks import gather_by_response
from tests.batches import load_batch, make_batch, make_config, rows_of

VARIANTS = [(family, tied) for family in ("llama", "qwen2", "qwen3", "qwen3_moe") for tied in (True, False)]

QWEN3 = QWEN3_MOE | {"architectures": ["Qwen3ForCausalLM"]}


def architecture(folder: Path, base: dict[str, Any] = LLAMA, **changes: Any) -> Architecture:
    """The architecture of a config.json with changes; a change to None removes the key."""
    config = {key: value for key, value in (base | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return architecture_of(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_architecture_of_a_checkpoint(checkpoint: Callable[..., Path], family: str, tied: bool) -> None:
    arch = architecture_of(checkpoint(family, tied=tied))
    assert (arch.num_layers, arch.hidden_size, arch.ffn_size, arch.vocab_size) == (4, 64, 96, 151)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (4, 2, 16)
    assert (arch.norm_eps, arch.rope_theta, arch.max_positions) == (1e-6, 10000.0, 512)
    assert arch.tied_embeddings is tied
    assert arch.qkv_bias is (family == "qwen2")
    assert arch.qk_norm is family.startswith("qwen3")
    experts = (arch.num_experts, arch.experts_per_token, arch.expert_ffn_size, arch.norm_topk_prob)
    assert experts == ((8, 2, 48, True) if family == "qwen3_moe" else (0, 0, 0, True))
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
        ({"architectures": ["MambaForCausalLM"]}, "names the architecture MambaForCausalLM; supported are Llama"),
        ({"architectures": None}, r"names the architecture \(none\)"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type='llama3' is not supported"),
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
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "norm_topk_prob=True is not supported: a single expert's weight"),
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


def load_in_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def expected_log_probs(model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Log-probs of the response's tokens, fp32, computed by transformers."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(response)), response]


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_log_probs_equal_those_of_transformers(
    layout: Layout, checkpoint: Callable[..., Path], family: str, tied: bool
) -> None:
    folder = checkpoint(family, tied=tied)
    policy = Policy(make_config(folder, rollout={"temperature": 0.7}), layout)
    batch = load_batch(policy)
    found = gather_by_response(batch.micro_batches(), policy.log_probs(batch))
    _, tokens = make_batch(policy.arch.vocab_size)
    reference = load_in_transformers(folder)
    for response, (prompt, answer, _unused) in rows_of(tokens).items():
        if len(answer):
            expected = expected_log_probs(reference, prompt.tolist(), answer.tolist(), 0.7)
            torch.testing.assert_close(found.pop(response), expected, atol=1e-4, rtol=0)
    assert not found


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
