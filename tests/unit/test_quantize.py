"""Quantised checkpoints: what is changed, what the files hold, what is reported and what is refused."""

import io
import json
import math
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.checkpoint.quantize import QuantizeOptions, quantize, split_prompts
from dapo_megatron.checkpoint.quantize_formats import FORMATS
from dapo_megatron.checkpoint.quantize_read import dequantize, read_back, round_inputs
from dapo_megatron.checkpoint.quantize_report import QuantizeReport, compare, next_token_log_probs, print_report
from dapo_megatron.errors import UserError
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.sync.fp8_format import quantize_blocks
from dapo_megatron.sync.fp8_plan import quantized_matrices
from tests.models import TINY_EXPERTS
from tests.quantization import LETTERS, WIDE, write_model, write_prompts

LARGEST_ERROR = {"fp8": 0.035, "fp8_block": 0.035, "fp8_channel": 0.035, "nvfp4": 0.12}
DENSE = [f"model.layers.{i}.{name}" for i in range(2) for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.txt")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense") / "model", **WIDE)


@pytest.fixture(scope="module", params=FORMATS)
def result(
    request: pytest.FixtureRequest, dense: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> QuantizeReport:
    out = tmp_path_factory.mktemp(request.param) / "out"
    return quantize(QuantizeOptions(dense, out, request.param, prompts))


def files_of(report: QuantizeReport) -> dict[str, Tensor]:
    return load_file(Path(report.out) / "model.safetensors")


def test_the_report_is_what_the_files_hold(result: QuantizeReport, dense: Path) -> None:
    tensors, original = files_of(result), load_file(dense / "model.safetensors")
    stored = {"nvfp4": torch.uint8}.get(result.format, torch.float8_e4m3fn)
    assert [layer.path for layer in result.layers if layer.quantized] == sorted(DENSE)
    for layer in result.layers:
        if layer.quantized:
            weight = tensors[f"{layer.path}.weight"]
            scales = [
                tensor for name, tensor in tensors.items() if name.startswith(f"{layer.path}.") and "scale" in name
            ]
            assert (weight.dtype, layer.dtype) == (stored, str(stored).removeprefix("torch."))
            assert layer.bytes_after == weight.nbytes + sum(scale.nbytes for scale in scales)
            assert layer.bytes_before == original[f"{layer.path}.weight"].nbytes
    kept = {layer.path: layer.reason for layer in result.layers if not layer.quantized}
    assert kept == {"model.embed_tokens": "embedding", "lm_head": "output head"}
    assert result.bytes_after == sum(tensor.nbytes for tensor in tensors.values())
    assert json.loads((Path(result.out) / "report.json").read_text()) == json.loads(result.to_json())
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 and "scale" not in name:
            assert torch.equal(tensor, original[name])


def test_both_configurations_name_the_format_and_the_kept_layers(result: QuantizeReport) -> None:
    config = json.loads((Path(result.out) / "config.json").read_text())["quantization_config"]
    other = json.loads((Path(result.out) / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"].upper() == other["quant_algo"].upper() == FORMATS[result.format].algorithm
    assert config["ignore"] == other["exclude_modules"] == ["lm_head", "model.embed_tokens"]
    assert (Path(result.out) / "tokenizer.json").is_file()


def test_weights_come_back_as_modelopt_reads_them(result: QuantizeReport, dense: Path) -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    tensors, original = files_of(result), load_file(dense / "model.safetensors")
    for path in DENSE:
        stored, scale, before = (tensors[f"{path}.weight"], tensors[f"{path}.weight_scale"], original[f"{path}.weight"])
        scale_2 = tensors.get(f"{path}.weight_scale_2")
        ours = dequantize(stored, scale, scale_2, FORMATS[result.format])
        if scale_2 is not None:
            quantized: Any = NVFP4QTensor(before.shape, before.dtype, stored)
            theirs = quantized.dequantize(scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        elif result.format == "fp8_block":
            blocks = {-1: 128, -2: 128}
            quantized = FP8QTensor(before.shape, before.dtype, stored)
            theirs = quantized.dequantize(scale=scale.squeeze(1).squeeze(-1), block_sizes=blocks)
        else:
            quantized = FP8QTensor(before.shape, before.dtype, stored)
            theirs = quantized.dequantize(scale=scale[:, None] if scale.ndim else scale)
        assert torch.equal(ours, theirs)
        layer = next(layer for layer in result.layers if layer.path == path)
        assert layer.error == pytest.approx(((ours - before).norm() / before.norm()).item())
        assert 0 < layer.error < LARGEST_ERROR[result.format]


@pytest.mark.parametrize("result", ["fp8", "fp8_channel"], indirect=True)
def test_log_probs_are_those_of_modelopts_own_simulation(result: QuantizeReport, dense: Path, prompts: Path) -> None:
    """modelopt rounds weights and inputs of the model in memory; ours comes from the files."""
    import modelopt.torch.quantization as mtq

    options = QuantizeOptions(dense, Path(), result.format, prompts)
    encoded = [[LETTERS.index(letter) for letter in line] for line in prompts.read_text().splitlines()]
    probe, calibration = split_prompts(encoded, options)
    model = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    before = torch.cat(list(next_token_log_probs(model, probe)))

    def run(model: Any) -> None:
        for prompt in calibration:
            model(torch.tensor([prompt]))

    model = mtq.quantize(model, getattr(mtq, FORMATS[result.format].preset), run)
    after = torch.cat(list(next_token_log_probs(model, probe)))
    tokens = torch.tensor([token for prompt in probe for token in prompt[1:]])[:, None]
    difference = (after - before).gather(1, tokens)
    assert result.probe.tokens == len(tokens)
    assert result.probe.mean_abs_difference == pytest.approx(difference.abs().mean().item(), rel=0.05)
    assert result.probe.mean_difference == pytest.approx(
        difference.mean().item(), abs=0.1 * difference.abs().mean().item()
    )
    divergence = (before.exp() * (before - after)).sum(-1).mean().item()
    assert result.probe.mean_kl == pytest.approx(divergence, rel=0.05)
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean().item()
    assert result.probe.top1_agreement == pytest.approx(agreement, abs=0.02)


def test_the_comparison_of_two_distributions() -> None:
    before, after = torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log(), torch.tensor([[0.25, 0.75], [0.875, 0.125]]).log()
    found = compare([[1, 0, 1]], [before], iter([after]))
    log = math.log
    differences = [log(0.25 / 0.75), log(0.125 / 0.25)]
    divergence = 0.75 * log(3) + 0.25 * log(1 / 3) + 0.75 * log(0.75 / 0.875) + 0.25 * log(2)
    assert (found.prompts, found.tokens, found.top1_agreement) == (1, 2, 0.5)
    assert found.mean_difference == pytest.approx(sum(differences) / 2)
    assert found.mean_abs_difference == pytest.approx(-sum(differences) / 2)
    assert found.max_abs_difference == pytest.approx(log(3))
    assert found.mean_kl == pytest.approx(divergence / 2)


def test_log_probs_are_of_the_next_token(dense: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    (rows,) = next_token_log_probs(model, prompt.tolist())
    loss = model(prompt, labels=prompt).loss.item()
    assert -rows.gather(1, prompt[0, 1:, None]).mean().item() == pytest.approx(loss, rel=1e-5)


def test_inputs_are_rounded_as_modelopt_does() -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    inputs = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0)) * 3
    inputs[0, 0, :32] = 0
    inputs[0, 1] = 0
    inputs[1, 0] *= 1e-5
    amax = inputs.abs().max()
    torch.testing.assert_close(round_inputs(inputs, amax.item() / 448, FORMATS["fp8"]), fp8_eager(inputs, amax))
    per_token = round_inputs(inputs, None, FORMATS["fp8_channel"])
    torch.testing.assert_close(per_token, fp8_eager(inputs, inputs.abs().amax(-1, keepdim=True)))
    blocks = inputs.unflatten(-1, (2, 128))
    per_block = fp8_eager(blocks, blocks.abs().amax(-1, keepdim=True)).flatten(-2)
    torch.testing.assert_close(round_inputs(inputs, None, FORMATS["fp8_block"]), per_block)
    scale_2 = amax / (6 * 448)
    quantized, scale, _ = NVFP4QTensor.quantize(inputs.clone(), 16, None, scale_2)
    expected = quantized.dequantize(scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    torch.testing.assert_close(round_inputs(inputs, scale_2.item(), FORMATS["nvfp4"]), expected)
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0])
    even = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]
    assert round_inputs(ties, 1.0, FORMATS["nvfp4"]).tolist() == even


def zero_parts(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"][3] = 0
    tensors["model.layers.0.self_attn.o_proj.weight"][:128, 128:] = 0  # a block of 128 x 128
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()  # fused with gate_proj; down_proj sees only zeros
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()


@pytest.mark.parametrize("name", FORMATS)
def test_zero_rows_blocks_and_matrices_have_scale_one(name: str, prompts: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", change=zero_parts, **WIDE)
    report = quantize(QuantizeOptions(model, tmp_path / "out", name, prompts))
    layers, tensors = {layer.path: layer for layer in report.layers}, files_of(report)
    for path, layer in layers.items():
        if layer.quantized and path not in {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"}:
            assert layer.error is not None
            assert 0 < layer.error < LARGEST_ERROR[name]  # the others lose nothing
    zero = layers["model.layers.1.mlp.down_proj"]
    assert (zero.scale_min, zero.scale_max, zero.error) == (1, 1, 0)
    if FORMATS[name].static_inputs:
        assert layers["model.layers.0.mlp.down_proj"].input_scale == 1
    up, gate = layers["model.layers.0.mlp.up_proj"], layers["model.layers.0.mlp.gate_proj"]
    if name == "fp8":
        assert up.scale_max == gate.scale_max  # vLLM gives both the larger one, which would ruin the other
    q_proj = tensors["model.layers.0.self_attn.q_proj.weight_scale"].float()
    o_proj = tensors["model.layers.0.self_attn.o_proj.weight_scale"].float()
    if name == "fp8_channel":
        assert (q_proj == 1).nonzero().flatten().tolist() == [3]
    if name == "fp8_block":
        assert (o_proj.squeeze() == 1).nonzero().tolist() == [[0, 1]]
    if name == "nvfp4":
        assert (q_proj[3] == 1).all()


def test_kept_layers_are_exactly_those_asked_for(prompts: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=12)
    keep = ("model.layers.1.**", "model.layers.*.mlp.down_proj")
    report = quantize(QuantizeOptions(model, tmp_path / "out", "fp8", prompts, keep))
    asked = {layer.path: layer.reason for layer in report.layers if layer.reason.startswith("--keep")}
    in_layer_1 = {path.replace("layers.0.", "layers.1.") for path in DENSE if "layers.0." in path}
    assert set(asked) == in_layer_1 | {f"model.layers.{i}.mlp.down_proj" for i in range(12)}
    assert asked["model.layers.10.mlp.down_proj"] == "--keep model.layers.*.mlp.down_proj"
    assert report.quantized == 11 * 6
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == set(asked) | {"lm_head", "model.embed_tokens"}


def test_a_bfloat16_model_in_several_files(prompts: Path, tmp_path: Path) -> None:
    single = write_model(tmp_path / "single", **WIDE)
    model = transformers.AutoModelForCausalLM.from_pretrained(single, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="1MB")
    (tmp_path / "model" / "tokenizer.json").write_bytes((single / "tokenizer.json").read_bytes())
    report = quantize(QuantizeOptions(tmp_path / "model", tmp_path / "out", "fp8", prompts))
    assert report.quantized == len(DENSE)
    assert max(layer.error or 0 for layer in report.layers) < LARGEST_ERROR["fp8"]
    exported = HFReader(tmp_path / "out")
    assert exported.dtype("lm_head.weight") == exported.dtype("model.norm.weight") == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "config", "router", "expert"),
    [
        ("Qwen3Moe", TINY_EXPERTS, "mlp.gate", "mlp.experts.7.gate_proj"),
        ("Mixtral", {"num_local_experts": 8}, "block_sparse_moe.gate", "block_sparse_moe.experts.7.w1"),
    ],
)
def test_experts_are_quantised_under_their_own_names(
    name: str, config: dict[str, Any], router: str, expert: str, prompts: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", name, num_hidden_layers=2, **config)
    report = quantize(QuantizeOptions(model, tmp_path / "out", "nvfp4", prompts, ("model.layers.1.mlp.experts",)))
    layers = {layer.path: layer for layer in report.layers}
    assert layers[f"model.layers.0.{expert}"].quantized
    assert layers[f"model.layers.1.{expert}"].reason == "--keep model.layers.1.mlp.experts"
    assert layers[f"model.layers.0.{router}"].reason == "router of experts"
    assert report.quantized == 2 * 4 + 8 * 3
    assert all(layer.error < LARGEST_ERROR["nvfp4"] for layer in layers.values() if layer.error is not None)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    experts = f"model.layers.1.{router.replace('gate', 'experts')}"
    routers = [f"model.layers.{i}.{router}" for i in range(2)]
    assert ignored == sorted([experts, *routers, "lm_head", "model.embed_tokens"])
    assert report.probe.mean_abs_difference > 0


def test_inputs_of_experts_are_rounded_in_the_comparison(prompts: Path, tmp_path: Path) -> None:
    """With weights that FP8 holds exactly, all of the difference comes from the experts' inputs."""

    def representable(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensor.copy_(torch.randint(-14, 15, tensor.shape) / 64)
                tensor[0, 0] = 14 / 64

    model = write_model(tmp_path / "model", "Qwen3Moe", representable, num_hidden_layers=1, **TINY_EXPERTS)
    report = quantize(QuantizeOptions(model, tmp_path / "out", "fp8", prompts, ("model.layers.*.self_attn.*",)))
    assert max(layer.error or 0 for layer in report.layers) < 1e-6
    assert report.probe.mean_abs_difference > 1e-4


def test_tied_head_and_tensors_that_transformers_does_not_load_are_told(prompts: Path, tmp_path: Path) -> None:
    extra = "model.layers.4.eh_proj.weight"  # as of a layer for multi-token prediction

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[extra] = torch.arange(6.0).view(2, 3)

    model = write_model(tmp_path / "model", change=add, tie_word_embeddings=True)
    report = quantize(QuantizeOptions(model, tmp_path / "out", "fp8", prompts))
    reasons = {layer.path: layer.reason for layer in report.layers if not layer.quantized}
    assert reasons == {
        "model.embed_tokens": "embedding",
        "model.layers.4.eh_proj": "no layer that transformers computes with",
        "lm_head": "output head, tied: its matrix is stored once, as another's",
    }
    assert HFReader(tmp_path / "out")(extra).tolist() == [[0, 1, 2], [3, 4, 5]]
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.embed_tokens", "model.layers.4.eh_proj"]


def test_layers_that_blocks_do_not_fit_are_kept_with_those_they_are_fused_with(prompts: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **WIDE | {"num_key_value_heads": 1, "num_hidden_layers": 1})
    report = quantize(QuantizeOptions(model, tmp_path / "out", "fp8_block", prompts))
    reasons = {layer.path.rpartition(".")[2]: layer.reason for layer in report.layers}
    assert reasons["q_proj"] == reasons["k_proj"] == reasons["v_proj"]
    assert "output width 64 is no multiple of 128" in reasons["q_proj"]
    assert reasons["o_proj"] == reasons["gate_proj"] == reasons["down_proj"] == ""


def test_the_table_groups_equal_layers(dense: Path, prompts: Path, tmp_path: Path) -> None:
    report = quantize(
        QuantizeOptions(dense, tmp_path / "out", "fp8_channel", prompts, ("model.layers.1.mlp.down_proj",))
    )
    console = Console(width=150, record=True, file=io.StringIO())
    print_report(report, console)
    lines = console.export_text().splitlines()
    down = [line for line in lines if "model.layers.*.mlp.down_proj" in line]
    assert ["kept: --keep model.layers.1.mlp.down_proj" in line for line in down] == [True, False]
    assert any("13 matrices quantised, 3 kept" in line for line in lines)
    assert any("taken at run time" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "fp4"}, "--format fp4: choose fp8, fp8_block, fp8_channel, nvfp4"),
        ({"keep": ("model.layers.0.mlp.gate",)}, r"--keep model\.layers\.0\.mlp\.gate is no layer.*mlp\.gate_proj"),
        ({"keep": ("model.layers.0",)}, r"the nearest is model\.layers\.0\.\*\*"),
        ({"keep": ("model.layers.0.self_attn.q_proj",)}, r"fuses with .*k_proj, .*v_proj: keep those as well"),
        ({"keep": ("model.layers.**",)}, r"nothing to quantise: all 15 layers are kept .*--keep model\.layers"),
        ({"max_prompt_tokens": 1}, "--max-prompt-tokens must be at least 2"),
        ({"model": Path("nowhere")}, "nowhere is no checkpoint: it has no config.json"),
        ({"prompts": Path("nowhere.txt")}, "the prompts nowhere.txt do not exist"),
    ],
)
def test_options_that_cannot_be_used(
    changes: dict[str, Any], message: str, dense: Path, prompts: Path, tmp_path: Path
) -> None:
    options = QuantizeOptions(dense, tmp_path / "out", "fp8", prompts)
    with pytest.raises(UserError, match=message):
        quantize(replace(options, **changes))
    assert not any(tmp_path.iterdir())


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def state_quantization(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))


def lose(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return remove


def unknown_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))


def spoil(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tokenizer, r"^\S+ has no tokenizer\.json"),
        (state_quantization, "is quantised already"),
        (lose("model.layers.1.mlp.up_proj.weight"), r"does not have: it is incomplete"),
        (lose("model.norm.weight"), r"lacks model\.norm\.weight and 0 other"),
        (unknown_model, "transformers cannot load"),
        (spoil, "not finite"),
    ],
)
def test_models_that_cannot_be_used(
    damage: Callable[[Path], None], message: str, prompts: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    damage(model)
    with pytest.raises(UserError, match=message):
        quantize(QuantizeOptions(model, tmp_path / "out", "fp8_channel", prompts))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_experts_that_cannot_be_quantised(prompts: Path, tmp_path: Path) -> None:
    qwen = write_model(tmp_path / "qwen", "Qwen3Moe", num_hidden_layers=1, **TINY_EXPERTS)
    with pytest.raises(UserError, match=r"no kernel for experts in FP8_PB_WO: use --format fp8 or nvfp4"):
        quantize(QuantizeOptions(qwen, tmp_path / "out", "fp8_block", prompts, ("model.layers.*.self_attn.*",)))
    granite = write_model(tmp_path / "granite", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UserError, match=r"modelopt would write model\.layers\.0\.\S+, which \S+granite does not have"):
        quantize(QuantizeOptions(granite, tmp_path / "out", "fp8", prompts))
    gpt = write_model(tmp_path / "gpt", "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts is a \w*GptOssExperts, which modelopt cannot"):
        quantize(QuantizeOptions(gpt, tmp_path / "out", "fp8", prompts))
    jet = write_model(tmp_path / "jet", "JetMoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=16)
    with pytest.raises(UserError, match=r"is a JetMoe\w+, which modelopt cannot quantise in a form that vLLM loads"):
        quantize(QuantizeOptions(jet, tmp_path / "out", "fp8", prompts))
    assert not (tmp_path / "out").exists()


def test_modelopt_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, dense: Path, prompts: Path, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name == "modelopt" or name.startswith("modelopt.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(UserError, match=r"nvidia-modelopt is not installed .*pip install 'dapo-megatron\[quantize\]'"):
        quantize(QuantizeOptions(dense, tmp_path / "out", "fp8", prompts))


def test_only_an_empty_folder_is_replaced(dense: Path, prompts: Path, tmp_path: Path) -> None:
    options = QuantizeOptions(dense, tmp_path / "out", "fp8_channel", prompts)
    options.out.mkdir()
    (options.out / "mine").write_text("x")
    with pytest.raises(UserError, match="exists already: remove it, or choose another name"):
        quantize(options)
    (options.out / "mine").unlink()
    before = {file.name: file.read_bytes() for file in dense.iterdir()}
    quantize(options)
    assert (options.out / "report.json").is_file()
    assert {file.name: file.read_bytes() for file in dense.iterdir()} == before


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files larger than 200 kB cannot be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_leaves_nothing(dense: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path / 'out'} cannot be written"):
        quantize(QuantizeOptions(dense, tmp_path / "out", "fp8_channel", prompts))
    assert not any(tmp_path.iterdir())


def test_files_that_differ_from_the_original_are_found(dense: Path, prompts: Path, tmp_path: Path) -> None:
    quantize(QuantizeOptions(dense, tmp_path / "out", "fp8", prompts))
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"holds another model\.norm\.weight"):
        read_back(HFReader(tmp_path / "out"), HFReader(dense), FORMATS["fp8"], str)
    tensors["model.norm.weight"][0] -= 1
    del tensors["model.layers.0.mlp.up_proj.input_scale"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"mlp\.up_proj has no scale for its inputs"):
        read_back(HFReader(tmp_path / "out"), HFReader(dense), FORMATS["fp8"], str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_pushed_in_fp8_has_the_numbers_of_a_quantised_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    """Byte by byte, with a block of zeros among them."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][128:, :128] = 0
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)

    model = write_model(tmp_path / "model", change=change, dtype=dtype, **WIDE)
    quantize(QuantizeOptions(model, tmp_path / "out", "fp8_block", write_prompts(tmp_path / "p.txt")))
    original, stored = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    matrices = quantized_matrices(architecture_of(model))
    assert matrices == {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert original[min(matrices)].dtype == dtype
    for name in matrices:
        numbers, scales = quantize_blocks(original[name])
        assert torch.equal(numbers.view(torch.uint8), stored[name].view(torch.uint8)), name
        due = stored[name.replace(".weight", ".weight_scale")]
        assert scales.dtype == due.dtype
        assert torch.equal(scales, due.reshape(scales.shape)), name
