"""config.json of single families: what becomes of it, what is refused, positions and FP8 that follow from it."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from config_helpers import LLAMA
from megatron.core.models.common.embeddings import RotaryEmbedding
from transformers import AutoConfig

from dapo_megatron.config.precision_rules import check_precision
from dapo_megatron.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.flops import layer_parameters
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.table import hf_shapes
from dapo_megatron.trainer.build import set_rotary
from dapo_megatron.trainer.rotary import LatentRotary, PackedRotary, inverse_frequencies

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
MIXTRAL = MISTRAL | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
GEMMA = LLAMA | {"architectures": ["GemmaForCausalLM"], "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}
YARN = DEEPSEEK_V3["rope_scaling"]


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def architecture(folder: Path, config: dict[str, Any], **changes: Any) -> Architecture:
    return architecture_of(write(folder, config | changes))


# --- config.json -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MISTRAL, {"sliding_window": 4096}, "sliding_window=4096 is not supported: it must be stated as null"),
        (MISTRAL, {"num_key_value_heads": None}, "num_key_value_heads=None is not supported: Mistral must state it"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts=None is not supported"),
        (GEMMA, {"head_dim": None}, "head_dim=None is not supported: Gemma must state it"),
        (GEMMA, {"hidden_act": "silu"}, "hidden_act='silu' is not supported: it must be gelu_pytorch_tanh"),
        (GEMMA, {"hidden_activation": "relu"}, "it must be gelu_pytorch_tanh"),
        (GEMMA, {"architectures": ["Gemma2ForCausalLM"]}, "names the architecture Gemma2ForCausalLM"),
        (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported: it must be 1e-06"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank=None is not supported"),
        (DEEPSEEK_V3, {"q_lora_rank": 0}, "q_lora_rank=0 is not supported"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias=True is not supported"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: it must be sigmoid"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported: it must be noaux_tc"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "first_k_dense_replace=61 is not supported: of 61 layers one"),
        (DEEPSEEK_V3, {"first_k_dense_replace": None}, "first_k_dense_replace=None is not supported"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported: it must be true"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported: it must be 2 to 256"),
        (DEEPSEEK_V3, {"n_group": 3}, "n_group=3 is not supported: it must divide the 256 experts"),
        (DEEPSEEK_V3, {"n_group": 256}, "n_group=256 is not supported: a group must have two experts"),
        (DEEPSEEK_V3, {"topk_group": 9}, "topk_group=9 is not supported: there are 8 groups"),
        (DEEPSEEK_V3, {"topk_group": 2}, "topk_group=2 is not supported: it must be half of num_experts_per_tok=8"),
        (DEEPSEEK_V3, {"routed_scaling_factor": 0}, "routed_scaling_factor=0 is not supported"),
        (DEEPSEEK_V3, {"routed_scaling_factor": None}, "routed_scaling_factor=None is not supported: it must be a num"),
        (DEEPSEEK_V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1 is not supported"),
        (
            DEEPSEEK_V3,
            {"rope_scaling": YARN | {"beta_fast": 1}},
            "beta_fast=1 is not supported: it must be a number ab",
        ),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": "x"}}, "mscale='x' is not supported"),
        (DEEPSEEK_V3, {"rope_theta": 1}, "rope_theta=1 is not supported: it must be a number above 1"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"type": "llama3"}}, "rope_type='llama3' is not supported: use default"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"factor": None}}, "factor=None is not supported"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": None}}, "mscale=None is not supported: state both"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"attention_factor": 2.0}}, "attention_factor=2.0 is not supported"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"truncate": False}}, "truncate=False is not supported"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "dequantise the checkpoint first"),
    ],
)
def test_what_megatron_would_silently_not_do_is_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        architecture(tmp_path, base, **changes)
    assert message in str(caught.value)


LLAMA3 = LLAMA_3_1_8B["rope_scaling"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "x"}, "hidden_size='x' is not supported: it must be a number of at least 1"),
        ({"hidden_size": 72.0}, "hidden_size=72.0 is not supported"),
        ({"hidden_size": 70}, "head_dim=None is not supported: 9 heads do not divide hidden_size=70"),
        ({"vocab_size": -1}, "vocab_size=-1 is not supported"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not supported"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not supported"),
        ({"num_attention_heads": True}, "num_attention_heads=True is not supported"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported: it must divide the 9 heads"),
        ({"head_dim": 0}, "head_dim=0 is not supported"),
        ({"intermediate_size": None}, "intermediate_size=None is not supported"),
        ({"max_position_embeddings": [1]}, "max_position_embeddings=[1] is not supported"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None is not supported: it must be a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan is not supported"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf is not supported"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True is not supported"),
        ({"rope_theta": 0}, "rope_theta=0 is not supported: it must be a number above 1"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] is not supported: it must be an object"),
        ({"rope_scaling": "x"}, "rope_scaling='x' is not supported: it must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "object of values that hold for all layers"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0 is not supported: it must be a"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor=0 is not supported"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0.5}}, "embeddings=0.5 is not supported"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is not supported: it must be true or false"),
        ({"layer_types": 5}, "layer_types=5 is not supported"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        architecture(tmp_path, LLAMA, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"rope_parameters": LLAMA3}, True),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 500000.0, "truncate": None}}, True),
        ({"rope_parameters": LLAMA3 | {"factor": 4.0}}, False),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 1e6}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, False),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None}, True),
    ],
)
def test_two_keys_for_positions_must_agree(tmp_path: Path, changes: dict[str, Any], same: bool) -> None:
    """transformers takes rope_scaling, and with it the base that stands beside it."""
    if same:
        arch = architecture(tmp_path, LLAMA_3_1_8B, **changes)
        theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert (arch.rope_theta, arch.rope_scaling is None) == (theirs["rope_theta"], theirs["rope_type"] == "default")
        return
    with pytest.raises(UserError, match=r"rope_scaling=.* is not supported: rope_parameters=.* differs"):
        architecture(tmp_path, LLAMA_3_1_8B, **changes)


def test_a_window_that_is_not_mentioned_is_mistrals_default(tmp_path: Path) -> None:
    config = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match="sliding_window=None is not supported: it must be stated as null"):
        architecture(tmp_path, config)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    assert architecture(tmp_path, MIXTRAL).rope_theta == 1e6
    assert architecture(tmp_path, MISTRAL).rope_theta == 1e4
    assert architecture(tmp_path, GEMMA).tied_embeddings
    assert not architecture(tmp_path, MISTRAL).tied_embeddings
    assert architecture(tmp_path, GEMMA, hidden_act="gelu").activation == "gelu_tanh"


def test_sizes_of_deepseek_v3(tmp_path: Path) -> None:
    """Its report counts 671B parameters of which 37B are active (arXiv 2412.19437)."""
    arch = architecture(tmp_path, DEEPSEEK_V3)
    assert [arch.has_experts(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert sum(map(math.prod, hf_shapes(arch).values())) == pytest.approx(671e9, rel=1e-3)
    active = arch.num_layers * layer_parameters(arch) + 2 * arch.vocab_size * arch.hidden_size
    assert active == pytest.approx(37e9, rel=0.02)
    assert not arch.uniform_layers
    assert architecture(tmp_path, DEEPSEEK_V3, first_k_dense_replace=0).uniform_layers


# --- positions ---------------------------------------------------------------------------------------------------


def transformers_rotary(config: Any) -> Any:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return (DeepseekV3RotaryEmbedding if config.model_type == "deepseek_v3" else LlamaRotaryEmbedding)(config)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA_3_1_8B, {}),
        (LLAMA_3_1_8B, {"rope_scaling": None}),
        (LLAMA_3_1_8B, {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0, "high_freq_factor": 2.0}}),
        (DEEPSEEK_V3, {}),
        (DEEPSEEK_V3, {"rope_scaling": None}),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale": None, "mscale_all_dim": None, "factor": 4}}),
    ],
)
def test_rotary_angles_equal_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    arch = architecture(tmp_path, config, **changes)
    positions = torch.tensor([0, 1, 2, 0, 1, 4000, 100_000])
    cos, sin = transformers_rotary(AutoConfig.from_pretrained(tmp_path))(torch.zeros(1), positions[None])
    rotary = (LatentRotary if arch.latent else PackedRotary)(arch)
    angles = rotary(rotary.get_rotary_seq_len(None, None, None, None, SimpleNamespace(positions=positions)))
    angles, scale = angles if isinstance(angles, tuple) else (angles, 1.0)
    assert angles.shape == ((7, 1, 64) if arch.latent else (7, 1, 1, 128))
    # an angle of 100,000 radians is known to 0.008 in fp32: the frequencies below must be exact
    near = positions <= 4000
    torch.testing.assert_close((angles.cos() * scale).reshape(7, -1)[near], cos[0, near], rtol=0, atol=5e-4)
    torch.testing.assert_close((angles.sin() * scale).reshape(7, -1)[near], sin[0, near], rtol=0, atol=5e-4)
    expected = transformers_rotary(AutoConfig.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(inverse_frequencies(arch), expected, rtol=1e-6, atol=0)


def test_megatrons_rotary_gets_the_frequencies_that_it_does_not_know(tmp_path: Path) -> None:
    """Of Llama 3's numbers it knows the factor alone; with Transformer Engine its own module computes the angles."""
    arch = architecture(tmp_path, LLAMA_3_1_8B)
    known = RotaryEmbedding(128, 1.0, rotary_base=500000.0, rope_scaling=True, use_cpu_initialization=True)
    rotary = RotaryEmbedding(128, 1.0, rotary_base=500000.0, use_cpu_initialization=True)
    set_rotary(SimpleNamespace(backend="te", arch=arch, rotary_pos_emb=rotary))  # type: ignore[arg-type]
    torch.testing.assert_close(rotary.inv_freq, known.inv_freq, rtol=1e-6, atol=0)


def test_bfloat16_does_not_round_the_frequencies(tmp_path: Path) -> None:
    arch = architecture(tmp_path, LLAMA, head_dim=16)
    (rotary,) = torch.nn.Sequential(PackedRotary(arch)).bfloat16()
    exact = 1e4 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(rotary.inverse_frequency.double(), exact, rtol=1e-6, atol=0)
    assert rotary(torch.tensor([257])).dtype == torch.float32


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, {}, None),
        ({}, {"tensor": 8, "sequence": True}, None),
        ({"q_lora_rank": 1544}, {}, "the query rank of Tiny is 1544"),
        ({"q_lora_rank": None}, {}, None),
        ({"kv_lora_rank": 520}, {}, "the key/value rank of Tiny is 520"),
        ({"qk_rope_head_dim": 72}, {}, "the key/value rank with the rotated part of Tiny is 584"),
        ({"qk_nope_head_dim": 120}, {"tensor": 128}, "the query rows of Tiny / parallel.tensor=128 is 184"),
        ({"v_head_dim": 120}, {"tensor": 128}, "the key and value rows of Tiny / parallel.tensor=128 is 248"),
        ({"intermediate_size": 18440}, {}, "the MLP size of Tiny is 18440"),
        ({"moe_intermediate_size": 2056}, {}, "the MLP size of each expert of Tiny is 2056"),
        ({"intermediate_size": 65536}, {"tensor": 256}, "shared experts of Tiny / parallel.tensor=256 is 8; use"),
    ],
)
def test_fp8_dimensions_of_latent_attention(
    tmp_path: Path, changes: dict[str, Any], layout: dict[str, Any], message: str | None
) -> None:
    arch = architecture(tmp_path, DEEPSEEK_V3, **changes)
    training = TrainingConfig.model_validate({"precision": "fp8", "fp8": {"recipe": "delayed"}})
    sections = (OptimizerConfig.model_validate({}), ParallelConfig.model_validate(layout))
    if message is None:
        check_precision(arch, training, *sections, model="Tiny")
        return
    with pytest.raises(UserError) as caught:
        check_precision(arch, training, *sections, model="Tiny")
    assert message in str(caught.value)


def test_dense_layers_and_experts_are_both_recomputed(tmp_path: Path) -> None:
    """What a model with experts in every layer refuses."""
    training = TrainingConfig.model_validate({"recompute": "selective", "recompute_modules": ["mlp", "moe"]})
    sections = (OptimizerConfig.model_validate({}), ParallelConfig.model_validate({}))
    check_precision(architecture(tmp_path, DEEPSEEK_V3), training, *sections, model="Tiny")
    with pytest.raises(UserError, match="recompute_modules names mlp, but Tiny has experts in every layer"):
        check_precision(architecture(tmp_path, MIXTRAL), training, *sections, model="Tiny")
