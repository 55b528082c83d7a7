"""What vLLM makes of quantised checkpoints: which layers it keeps, and the shapes it loads."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.quantization import modelopt

from dapo_megatron.checkpoint.quantize import QuantizeOptions, quantize, split_prompts
from dapo_megatron.checkpoint.quantize_formats import FORMATS
from dapo_megatron.checkpoint.quantize_report import next_token_log_probs
from tests.models import REPOSITORY, TINY_EXPERTS
from tests.quantization import LETTERS, WIDE, write_model, write_prompts

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def configurations(folder: Path) -> list[Any]:
    """vLLM's configuration as it is made of config.json, and of the file for older versions."""
    made = []
    for content in (
        json.loads((folder / "config.json").read_text())["quantization_config"],
        json.loads((folder / "hf_quant_config.json").read_text()),
    ):
        algorithm = content.get("quant_algo") or content["quantization"]["quant_algo"]
        kind = modelopt.ModelOptNvFp4Config if algorithm == "NVFP4" else modelopt.ModelOptFp8Config
        made.append(kind.from_config(content))
        made[-1].packed_modules_mapping = FUSED
    return made


def test_vllm_keeps_exactly_the_kept_layers(tmp_path: Path) -> None:
    """vLLM also looks for kept paths inside names: layer 1 must not stand for 10 and 11."""
    model = write_model(tmp_path / "model", num_hidden_layers=12)
    keep = ("model.layers.1.**", "model.layers.2.self_attn.o_proj", "model.layers.*.mlp.down_proj")
    quantize(QuantizeOptions(model, tmp_path / "out", "fp8", write_prompts(tmp_path / "p.txt"), keep))
    names = [f"model.layers.{i}.{name}" for i in range(12) for name in (
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]  # fmt: skip
    kept = {name for name in names if ".layers.1." in name or name.endswith("down_proj")}
    kept |= {"model.layers.2.self_attn.o_proj", "lm_head", "model.embed_tokens"}
    for config in configurations(tmp_path / "out"):
        assert {name for name in (*names, "lm_head", "model.embed_tokens") if config.is_layer_excluded(name)} == kept


def test_vllm_keeps_routers_and_whole_blocks_of_experts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "Qwen3Moe", num_hidden_layers=11, **TINY_EXPERTS)
    keep = ("model.layers.1.mlp.experts",)
    quantize(QuantizeOptions(model, tmp_path / "out", "nvfp4", write_prompts(tmp_path / "p.txt"), keep))
    for config in configurations(tmp_path / "out"):
        assert [config.is_layer_excluded(f"model.layers.{i}.mlp.experts") for i in (0, 1, 2, 10)] == [
            False, True, False, False]  # fmt: skip
        assert all(config.is_layer_excluded(f"model.layers.{i}.mlp.gate") for i in range(11))
        assert not any(config.is_layer_excluded(f"model.layers.{i}.self_attn.qkv_proj") for i in range(11))


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parameters ask for their place among tensor-parallel ranks."""
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", FORMATS)
def test_tensors_have_the_shapes_that_vllm_loads(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **WIDE)
    report = quantize(QuantizeOptions(model, tmp_path / "out", name, write_prompts(tmp_path / "p.txt")))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = configurations(tmp_path / "out")[0]
    spec, context, _ = modelopt.resolve(config.quant_method, config, "")
    for path in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"):
        found = next(layer for layer in report.layers if layer.path == path)
        layer = torch.nn.Module()
        shapes = modelopt.Shapes([found.shape[0]], found.shape[1], torch.bfloat16)
        modelopt.SCHEME_FOR[spec.weight].create_weights(layer, modelopt.WEIGHT, context, shapes, SimpleNamespace)
        modelopt.SCHEME_FOR[spec.activation].create_weights(layer, modelopt.ACT, context, shapes, SimpleNamespace)
        expected = {kind: (parameter.dtype, parameter.shape) for kind, parameter in layer.named_parameters()}
        stored = {kind.removeprefix(f"{path}."): tensors[kind] for kind in tensors if kind.startswith(f"{path}.")}
        # vLLM has one number for each of the layers that it fuses, here for one.
        as_loaded = {kind: tensor if tensor.ndim else tensor.reshape(1) for kind, tensor in stored.items()}
        assert {kind: (tensor.dtype, tensor.shape) for kind, tensor in as_loaded.items()} == expected


VLLM_LOG_PROBS = """
import json, sys
from vllm import LLM, SamplingParams

model, prompts, out = sys.argv[1:]
llm = LLM(model, max_model_len=64, enforce_eager=True, dtype="bfloat16", skip_tokenizer_init=True)
options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
prompts = json.loads(prompts)
replies = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options)
log_probs = [
    [position[token].logprob for position, token in zip(reply.prompt_logprobs[1:], prompt[1:])]
    for reply, prompt in zip(replies, prompts)
]
json.dump(log_probs, open(out, "w"))
"""


def test_vllm_computes_what_the_report_says(tmp_path: Path) -> None:
    """In the one format that vLLM computes in on any CPU; bfloat16 rounds single inputs in other directions."""
    model = write_model(tmp_path / "model", **WIDE)
    options = QuantizeOptions(model, tmp_path / "out", "fp8_channel", write_prompts(tmp_path / "p.txt"))
    report = quantize(options)
    lines = options.prompts.read_text().splitlines()
    prompts, _ = split_prompts([[LETTERS.index(letter) for letter in line] for line in lines], options)
    subprocess.run(
        [sys.executable, "-c", VLLM_LOG_PROBS, options.out, json.dumps(prompts), tmp_path / "log_probs.json"],
        env=os.environ
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
        check=True,
        cwd=REPOSITORY,
        timeout=240,
    )
    served = torch.tensor(json.loads((tmp_path / "log_probs.json").read_text())).flatten()
    distributions = next_token_log_probs(AutoModelForCausalLM.from_pretrained(model), prompts)
    pairs = zip(distributions, prompts, strict=True)
    before = torch.cat([rows[torch.arange(len(rows)), torch.tensor(prompt[1:])] for rows, prompt in pairs])
    assert (served - before).abs().mean().item() == pytest.approx(report.probe.mean_abs_difference, rel=0.25)
