"""FP8 and the other precisions: alignment, what is refused and why, and the fields that megatron-core gets."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from config_helpers import write_config, write_model

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from megatron.core import fp8_utils
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from dapo_megatron.config import preflight
from dapo_megatron.config.load import load_config
from dapo_megatron.config.precision import ALIGNMENT, Recipe, packed_alignment, sequence_alignment
from dapo_megatron.config.precision_rules import (
    SUPPORT,
    Machine,
    check_hardware,
    check_precision,
    fp8_environment,
    parse_version,
)
from dapo_megatron.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.trainer import no_te, precision

QWEN_7B = Architecture(
    "Qwen2ForCausalLM", 28, 3584, 28, 4, 128, 18944, 152064, 1e-6, 1e6, 32768, False, True
)  # sizes of Qwen2.5-7B
EXPERTS = replace(QWEN_7B, num_experts=128, experts_per_token=8, expert_ffn_size=768)
HOPPER = Machine(capability=(9, 0), cuda=(13, 0), te="2.16.0+4220403e")
NO_OFFLOAD = OptimizerConfig.model_validate({})


def training(**values: Any) -> TrainingConfig:
    """A section of dotted keys with `__` for the dot: `fp8__recipe`."""
    nested: dict[str, Any] = {"precision": "fp8"}
    for key, value in values.items():
        section, _, name = key.partition("__")
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[section] = value
    return TrainingConfig.model_validate(nested)


def parallel(**values: Any) -> ParallelConfig:
    return ParallelConfig.model_validate(values)


def check(settings: TrainingConfig, arch: Architecture = QWEN_7B, *, cpu_offload: float = 0.0, **layout: Any) -> None:
    optimizer = OptimizerConfig.model_validate({"cpu_offload": cpu_offload})
    check_precision(arch, settings, optimizer, parallel(**layout), model="Qwen2.5-7B")


def refusal(settings: TrainingConfig, arch: Architecture = QWEN_7B, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(settings, arch, **arguments)
    return str(caught.value)


# --- alignment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "layout", "expected"),
    [
        ({"precision": "bf16"}, {}, 1),
        ({"precision": "bf16"}, {"context": 3}, 6),
        ({"precision": "bf16"}, {"tensor": 3}, 1),
        ({"precision": "bf16"}, {"tensor": 3, "sequence": True}, 3),
        ({"precision": "bf16"}, {"tensor": 3, "sequence": True, "context": 2}, 12),
        ({}, {}, 128),
        ({"fp8__recipe": "delayed"}, {}, 16),
        ({"fp8__recipe": "tensorwise"}, {"context": 2}, 32),
        ({"fp8__recipe": "mxfp8"}, {"context": 2, "tensor": 4}, 64),
        ({"fp8__recipe": "blockwise"}, {"context": 2, "tensor": 8, "sequence": True}, 2048),
        ({"fp8__recipe": "delayed"}, {"context": 3, "tensor": 5, "sequence": True}, 240),
    ],
)
def test_packed_alignment(settings: dict[str, Any], layout: dict[str, Any], expected: int) -> None:
    config, ranks = training(**settings), parallel(**layout)
    assert packed_alignment(config, ranks) == expected
    pieces = ranks.context * (ranks.tensor if ranks.sequence else 1)
    per_piece = ALIGNMENT[config.fp8.recipe] if config.precision == "fp8" else 1
    assert expected % pieces == 0  # every piece has the recipe's alignment
    assert expected // pieces % per_piece == 0
    assert expected % sequence_alignment(config, ranks) == 0  # the tail ends on whole sequences


def test_sequence_alignment_takes_the_layout_and_the_users_wish() -> None:
    assert sequence_alignment(training(precision="bf16"), parallel()) == 1
    assert sequence_alignment(training(precision="bf16", sequence_multiple=10), parallel(context=2)) == 20


# --- what no machine could run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_one_line_configures_an_actor_and_each_recipe_is_one_more(recipe: Recipe) -> None:
    check(training())
    check(training(fp8__recipe=recipe, **({"fp8__param_gather": True} if recipe == "mxfp8" else {})), tensor=4)
    check(training(), EXPERTS, tensor=4)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"layer_backend": "local"}, {}, "training.layer_backend=local; use auto or te"),
    ({"precision": "fp32", "layer_backend": "te"}, {}, "training.precision=fp32; use auto or local"),
    ({"precision": "bf16", "fp8__recipe": "delayed"}, {}, "training.precision=bf16 does not read it"),
    ({"precision": "fp16", "fp8__param_gather": True}, {}, "training.precision=fp16 does not read it"),
    (
        {"fp8__recipe": "delayed", "fp8__first_last_layers_bf16": True},
        {},
        "does not go with training.fp8.recipe=delayed",
    ),
    (
        {"fp8__recipe": "delayed", "recompute": "selective", "recompute_modules": ["core_attn", "layernorm"]},
        {},
        "recompute_modules names layernorm, which training.fp8.recipe=delayed cannot",
    ),
    ({"fp8__recipe": "mxfp8"}, {}, "needs training.fp8.param_gather=true"),
    ({"fp8__margin": 1}, {}, "training.fp8.margin=1 is read with training.fp8.recipe=delayed only"),
    ({"fp8__amax_history": 16}, {}, "training.fp8.amax_history=16 is read with"),
    ({"fp8__amax_algorithm": "most_recent"}, {}, "training.fp8.amax_algorithm=most_recent is read with"),
    ({"fp8__bf16_layers_at_end": 2}, {}, "bf16_layers_at_end=2 is read with training.fp8.first_last_layers_bf16"),
    (
        {"fp8__first_last_layers_bf16": True, "fp8__bf16_layers_at_start": 8},
        {"pipeline": 4},
        "bf16_layers_at_start=8 exceeds the 7 layers of a pipeline stage",
    ),
    (
        {"fp8__first_last_layers_bf16": True, "fp8__bf16_layers_at_start": 0, "fp8__bf16_layers_at_end": 0},
        {},
        "no layers at start or end; use false",
    ),
    (
        {"fp8__first_last_layers_bf16": True, "fp8__bf16_layers_at_start": 14, "fp8__bf16_layers_at_end": 14},
        {"pipeline": 2},
        "keeps 14 + 14 layers in bf16, which leaves none of the 28",
    ),
    ({}, {"cpu_offload": 0.5}, "optimizer.cpu_offload=0.5 in FP8 works with training.fp8.recipe=delayed only"),
    ({}, {"tensor": 8}, "query, key and value rows of Qwen2.5-7B / parallel.tensor=8 is 576; use a parallel.tensor"),
]


@pytest.mark.parametrize(("settings", "layout", "expected"), REFUSED)
def test_refused(settings: dict[str, Any], layout: dict[str, Any], expected: str) -> None:
    assert expected in refusal(training(**settings), **layout)


@pytest.mark.parametrize(
    ("change", "layout", "expected"),
    [
        ({"hidden_size": 3600}, {}, "the hidden size of Qwen2.5-7B is 3600; use the recipe delayed or tensorwise"),
        ({"num_heads": 13, "head_dim": 64}, {}, "query, key and value rows of Qwen2.5-7B is 1344; use the recipe"),
        ({"num_heads": 7, "num_kv_heads": 7, "head_dim": 72}, {}, "rows of Qwen2.5-7B is 1512; use training.precision"),
        ({"num_heads": 9, "num_kv_heads": 1, "head_dim": 64}, {}, "value rows of Qwen2.5-7B is 704"),
        ({"num_heads": 6, "num_kv_heads": 3, "ffn_size": 1152}, {"tensor": 3}, None),
        ({"num_heads": 6, "num_kv_heads": 6, "head_dim": 64}, {"tensor": 2}, "rows of Qwen2.5-7B / parallel.tensor=2"),
        ({"num_heads": 6, "num_kv_heads": 1, "head_dim": 64}, {"tensor": 1}, None),
        ({"num_heads": 6, "num_kv_heads": 1, "head_dim": 32}, {}, "the attention output of Qwen2.5-7B is 192; "),
        ({"ffn_size": 18960}, {}, "the MLP size of Qwen2.5-7B is 18960; use the recipe delayed or tensorwise"),
        ({"ffn_size": 18976}, {}, "18976; use the recipe delayed or tensorwise or mxfp8"),
        ({"ffn_size": 18945}, {}, "the MLP size of Qwen2.5-7B is 18945; use training.precision=bf16"),
    ],
)
def test_dimensions(change: dict[str, Any], layout: dict[str, Any], expected: str | None) -> None:
    arch = replace(QWEN_7B, **change)
    if expected is None:
        check(training(), arch, **layout)
    else:
        assert expected in refusal(training(), arch, **layout)


def test_feed_forward_is_divided_by_its_own_ranks() -> None:
    """18,944 = 148 x 128 divides by 4, not by 8; experts are split over expert-tensor-parallel ranks only."""
    wide = replace(QWEN_7B, num_heads=64, num_kv_heads=32)
    check(training(), wide, tensor=4)
    assert "the MLP size of Qwen2.5-7B / parallel.tensor=8 is 2368" in refusal(training(), wide, tensor=8)
    check(training(), replace(EXPERTS, num_heads=64, num_kv_heads=32, ffn_size=1), tensor=8)
    text = refusal(training(), EXPERTS, expert_tensor=4)
    assert "the MLP size of each expert of Qwen2.5-7B / parallel.expert_tensor=4 is 192; " in text
    assert text.endswith("use a parallel.expert_tensor that divides 6")


@pytest.mark.parametrize(
    ("settings", "arch", "expected"),
    [
        ({"recompute": "full", "recompute_modules": ["mlp"]}, QWEN_7B, "is read where training.recompute=selective"),
        ({"recompute": "selective", "recompute_modules": []}, QWEN_7B, "recomputes nothing"),
        ({"recompute": "selective", "recompute_modules": ["moe"]}, QWEN_7B, "names moe, but Qwen2.5-7B has no experts"),
        ({"recompute": "selective", "recompute_modules": ["mlp"]}, EXPERTS, "has experts in every layer; use moe"),
        (
            {"recompute": "selective", "recompute_modules": ["moe_act"], "layer_backend": "local"},
            EXPERTS,
            "names moe_act, which the grouped experts of Transformer Engine have",
        ),
    ],
)
def test_recompute(settings: dict[str, Any], arch: Architecture, expected: str) -> None:
    assert expected in refusal(training(precision="bf16", **settings), arch)


# --- the rules are asked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.context=3", "training.micro_batch_tokens=138"], None),  # 136 tokens, padded to 138
        (["parallel.context=3", "training.micro_batch_tokens=137"], "= 136, padded to a multiple of 6: 138"),
        (["parallel.context=3", "training.micro_batch_tokens=512"], "must be a multiple of 6, as"),
        (["parallel.context=3", "training.micro_batch_tokens=512"], "use 510"),
        (["training.precision=fp8", "training.micro_batch_tokens=512"], None),
        (["training.precision=fp8", "training.micro_batch_tokens=520"], "must be a multiple of 128, as"),
        (["training.precision=fp8", "training.micro_batch_tokens=140"], "use 256"),  # 128 would be too short
        (["training.sequence_multiple=100", "training.micro_batch_tokens=199"], "padded to a multiple of 100: 200"),
    ],
)
def test_micro_batch_tokens(tmp_path: Path, overrides: list[str], expected: str | None) -> None:
    path = write_config(tmp_path)
    if expected is None:
        load_config(path, overrides)
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        load_config(path, overrides)


def test_preflight_asks_for_the_models_dimensions(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = load_config(write_config(tmp_path), ["training.precision=fp8"])
    with pytest.raises(UserError, match="needs multiples of 128, but the hidden size of model is 72"):
        preflight.preflight(config, 1)


@pytest.mark.parametrize("override", ["training.precision=fp8", "training.layer_backend=te"])
def test_preflight_asks_for_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    config = load_config(write_config(tmp_path), [override])
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"{re.escape(override)} needs Transformer Engine, which is not installed: run"):
        preflight.check_te(config)
    preflight.check_te(load_config(write_config(tmp_path), ["training.precision=bf16"]))
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    preflight.check_te(config)


# --- what this machine cannot run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "machine", "layout", "expected"),
    [
        ({}, HOPPER, {}, None),
        ({}, Machine(None, None, None), {}, "needs a CUDA GPU, which this machine lacks; use training.precision=bf16"),
        ({}, replace(HOPPER, te=None), {}, "needs Transformer Engine: run `pip install"),
        ({}, replace(HOPPER, capability=(8, 0)), {}, "9.0 or later, this one has 8.0; use training.precision=bf16"),
        ({}, replace(HOPPER, capability=(8, 9)), {}, "this one has 8.9; use the recipe delayed or tensorwise"),
        ({"fp8__recipe": "delayed"}, replace(HOPPER, capability=(8, 9)), {}, None),
        (
            {"fp8__recipe": "mxfp8"},
            HOPPER,
            {},
            "10.0 or 10.3, this one has 9.0; use the recipe delayed or tensorwise or",
        ),
        ({"fp8__recipe": "mxfp8"}, replace(HOPPER, capability=(12, 0)), {}, "10.0 or 10.3, this one has 12.0"),
        ({"fp8__recipe": "mxfp8"}, replace(HOPPER, capability=(10, 3)), {}, None),
        ({}, replace(HOPPER, cuda=(12, 8)), {}, "needs CUDA 12.9, torch was built with 12.8"),
        ({"fp8__recipe": "tensorwise"}, replace(HOPPER, cuda=(12, 8)), {}, None),
        ({}, replace(HOPPER, te="2.2.1"), {}, "needs Transformer Engine 2.3, this machine has 2.2.1"),
        ({"fp8__recipe": "tensorwise"}, replace(HOPPER, te="2.1"), {}, "needs Transformer Engine 2.2"),
        (
            {"recompute": "selective", "recompute_modules": ["layernorm"]},
            replace(HOPPER, te="2.5.0"),
            {},
            "needs Transformer Engine 2.6",
        ),
        ({"precision": "bf16"}, replace(HOPPER, capability=(7, 5)), {}, "8.0 or later, this one has 7.5"),
        ({"precision": "fp16"}, replace(HOPPER, capability=(7, 5)), {}, None),
        ({"precision": "bf16"}, Machine(None, None, None), {"context": 2, "context_comm": "a2a"}, None),
        ({}, replace(HOPPER, te="2.9.0"), {"context": 2, "context_comm": "a2a"}, "needs Transformer Engine 2.10"),
        ({}, replace(HOPPER, te="2.9.0"), {"context_comm": "a2a"}, None),
        ({}, replace(HOPPER, te="2.9.0"), {"context": 2}, None),
        ({}, replace(HOPPER, te="2.10.0"), {"context": 2, "context_comm": "a2a"}, None),
        ({}, HOPPER, {"context": 2, "context_comm": "all_gather"}, "needs Transformer Engine 2.18, this machine has"),
        ({"precision": "fp32"}, HOPPER, {"context": 2, "context_comm": "all_gather"}, None),
        ({"precision": "bf16", "layer_backend": "local"}, HOPPER, {"context": 2, "context_comm": "all_gather"}, None),
    ],
)
def test_hardware(settings: dict[str, Any], machine: Machine, layout: dict[str, Any], expected: str | None) -> None:
    def run() -> None:
        check_hardware(training(**settings), NO_OFFLOAD, parallel(**layout), machine)

    if expected is None:
        run()
        return
    with pytest.raises(UserError, match=r"^(training|parallel)") as caught:
        run()
    assert expected in str(caught.value)


def test_offload_needs_a_gpu_and_transformer_engine() -> None:
    offload = OptimizerConfig.model_validate({"cpu_offload": 1})
    settings = training(precision="bf16")
    check_hardware(settings, offload, parallel(), HOPPER)
    with pytest.raises(UserError, match=r"needs a GPU: on this machine .* use 0"):
        check_hardware(settings, offload, parallel(), Machine(None, None, None))
    with pytest.raises(UserError, match="needs Transformer Engine, without which"):
        check_hardware(settings, offload, parallel(), replace(HOPPER, te=None))


def test_this_machine_is_checked() -> None:
    machine = precision.this_machine()
    assert machine.capability == (torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    assert machine.te == no_te.te_version()
    precision.check_machine(training(precision="fp32"), NO_OFFLOAD, parallel())
    if machine.te is None:
        with pytest.raises(UserError, match=r"training\.precision=fp8 .* needs"):
            precision.check_machine(training(), NO_OFFLOAD, parallel())


def test_versions() -> None:
    assert parse_version("2.16.0+4220403e") == (2, 16)
    assert parse_version("12.9") == (12, 9)
    with pytest.raises(ValueError, match="not a version"):
        parse_version("dev")


def test_block_scales_are_fp32_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    assert [fp8_environment(x) for x in (None, (8, 9), (9, 0), (10, 0))] == [{}, {}, {name: "1"}, {}]
    monkeypatch.setattr(precision, "_capability", lambda: (9, 0))
    monkeypatch.delenv(name, raising=False)
    precision.set_environment()
    assert precision.os.environ[name] == "1"
    monkeypatch.setenv(name, "0")  # the user's own choice stays
    precision.set_environment()
    assert precision.os.environ[name] == "0"


def test_rules_need_no_torch() -> None:
    code = "import sys, dapo_megatron.config.precision_rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# --- fields of megatron-core -------------------------------------------------------------------------------------


FP8_FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {},
        {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False, "first_last_layers_bf16": False},
    ),
    (
        {"fp8__recipe": "delayed", "fp8__format": "hybrid", "fp8__margin": 1, "fp8__amax_history": 16},
        {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_margin": 1,
            "fp8_amax_history_len": 16,
            "fp8_amax_compute_algo": "max",
        },
    ),
    ({"fp8__recipe": "delayed"}, {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "fp8_margin": 0}),
    (
        {"fp8__recipe": "delayed", "fp8__amax_algorithm": "most_recent"},
        {"fp8_amax_compute_algo": "most_recent"},
    ),
    (
        {
            "fp8__recipe": "tensorwise",
            "fp8__first_last_layers_bf16": True,
            "fp8__bf16_layers_at_start": 2,
            "fp8__bf16_layers_at_end": 3,
        },
        {
            "fp8_recipe": "tensorwise",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 2,
            "num_layers_at_end_in_bf16": 3,
        },
    ),
    ({"fp8__recipe": "mxfp8", "fp8__param_gather": True}, {"fp8_recipe": "mxfp8", "fp8_param": True}),
]


def megatron_config(settings: TrainingConfig, **changes: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {"num_layers": 8, "hidden_size": 128, "num_attention_heads": 4}
    return TransformerConfig(**sizes, **precision.transformer_fields(settings), **changes)


@pytest.mark.parametrize(("settings", "expected"), FP8_FIELDS)
def test_fp8_fields(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    config = megatron_config(training(**settings))
    assert {key: getattr(config, key) for key in expected} == expected
    assert (config.params_dtype, config.bf16, config.fp16) == (torch.bfloat16, True, False)


@pytest.mark.parametrize("settings", [settings for settings, _ in FP8_FIELDS])
def test_fp8_reaches_optimizer_and_gradients(settings: dict[str, Any]) -> None:
    config = training(**settings)
    optimizer = MegatronOptimizerConfig(**precision.optimizer_fields(config, NO_OFFLOAD))
    ddp = DistributedDataParallelConfig(**precision.ddp_fields(config))
    mxfp8 = config.fp8.recipe == "mxfp8"
    assert (optimizer.fp8_recipe, optimizer.reuse_grad_buf_for_mxfp8_param_ag) == (config.fp8.recipe, mxfp8)
    assert ddp.reuse_grad_buf_for_mxfp8_param_ag is mxfp8
    assert ddp.fp8_param_gather is config.fp8.param_gather
    assert ddp.grad_reduce_in_fp32


def test_bf16_layers_are_those_at_start_and_end() -> None:
    """Megatron's own reading of the fields."""
    settings = training(
        fp8__recipe="tensorwise",
        fp8__first_last_layers_bf16=True,
        fp8__bf16_layers_at_start=2,
        fp8__bf16_layers_at_end=3,
    )
    config = megatron_config(settings)
    in_bf16 = [layer for layer in range(8) if fp8_utils.is_first_last_bf16_layer(config, layer)]
    assert in_bf16 == [0, 1, 5, 6, 7]


def test_megatron_agrees_with_the_rules_it_has() -> None:
    """Megatron refuses what `check_precision` refuses before it; both must move together."""
    with pytest.raises(ValueError, match="first / last layer in BF16"):
        megatron_config(training(fp8__recipe="delayed", fp8__first_last_layers_bf16=True))
    with pytest.raises(ValueError, match="Delayed scaling does not support"):
        megatron_config(training(fp8__recipe="delayed", recompute="selective", recompute_modules=["layernorm"]))
    with pytest.raises(ValueError, match="num_layers_at_start_in_bf16"):
        megatron_config(training(fp8__first_last_layers_bf16=True, fp8__bf16_layers_at_start=9))


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    settings = training(precision=name)
    config = megatron_config(settings)
    optimizer = MegatronOptimizerConfig(**precision.optimizer_fields(settings, NO_OFFLOAD))
    ddp = DistributedDataParallelConfig(**precision.ddp_fields(settings))
    for megatron in (config, optimizer):
        assert (megatron.params_dtype, megatron.bf16, megatron.fp16) == (dtype, name == "bf16", name == "fp16")
    assert (config.fp8, optimizer.fp8_recipe, ddp.fp8_param_gather) == (None, None, False)
    assert config.pipeline_dtype == dtype
    assert (optimizer.loss_scale, optimizer.main_grads_dtype) == (None, torch.float32)
    if name == "fp16":
        assert (optimizer.initial_loss_scale, optimizer.hysteresis) == (2.0**16, 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None, None)),
        ({"recompute": "full"}, ("full", "uniform", 1)),
        ({"recompute": "selective"}, ("selective", None, None)),
        ({"recompute": "selective", "recompute_modules": ["layernorm", "mlp"]}, ("selective", None, None)),
    ],
)
def test_recompute_fields(settings: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = training(precision="bf16", **settings)
    megatron = megatron_config(config)
    assert (megatron.recompute_granularity, megatron.recompute_method, megatron.recompute_num_layers) == expected
    assert megatron.recompute_modules == config.recompute_modules


def test_offload_fields() -> None:
    optimizer = OptimizerConfig.model_validate({"cpu_offload": 0.25})
    megatron = MegatronOptimizerConfig(**precision.optimizer_fields(training(precision="bf16"), optimizer))
    assert (megatron.optimizer_cpu_offload, megatron.optimizer_offload_fraction) == (True, 0.25)
    names = {field.name for field in fields(MegatronOptimizerConfig)}
    assert set(precision.optimizer_fields(training(), optimizer)) <= names


def test_high_precision_hands_on_what_is_not_fp8() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
    assert precision.high_precision(parameter).data_ptr() == parameter.data_ptr()


def test_high_precision_dequantises(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    monkeypatch.setattr(fp8_utils, "is_float8tensor", lambda tensor: tensor is parameter)
    monkeypatch.setattr(fp8_utils, "dequantize_fp8_tensor", lambda tensor: tensor.detach() * 3)
    assert precision.high_precision(parameter).tolist() == [3, 3]


def test_each_recipe_has_an_alignment_and_its_needs() -> None:
    assert ALIGNMENT.keys() == SUPPORT.keys()
