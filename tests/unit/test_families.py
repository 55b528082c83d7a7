"""What models of single families do that others do not: routers, scaled embeddings, layers that are not trained."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dapo_megatron.checkpoint.export import export_hf
from dapo_megatron.checkpoint.hf import HFReader
from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models import registry
from dapo_megatron.models.checkpoint_keys import stored_parameter
from dapo_megatron.models.registry import architecture_of
from dapo_megatron.models.sharding import load_shard, merge_shards
from dapo_megatron.models.table import exact_tensors, hf_shapes, parameter_table
from dapo_megatron.trainer.build import PolicyModel, build_model, load_weights
from dapo_megatron.trainer.parallel import Layout
from dapo_megatron.trainer.policy import Policy
from dapo_megatron.trainer.weights import WeightSync
from tests.against_transformers import check_log_probs
from tests.batches import load_batch, make_config
from tests.checkpoints import random_checkpoint
from tests.models import REPOSITORY, TINY, TINY_FAMILIES, tiny_model
from tests.pushing import plan_of


def built(folder: Path, precision: str = "fp32") -> PolicyModel:
    training = TrainingConfig.model_validate({"precision": precision})
    (model,) = build_model(architecture_of(folder), ParallelConfig.model_validate({}), training, temperature=1.0)
    load_weights(model, HFReader(folder))
    return model


# --- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_megatron_saves_what_the_table_says(layout: Layout, checkpoint: Callable[..., Path], family: str) -> None:
    """Under one key for all layers where they are alike, under one for each where some have no experts."""
    folder = checkpoint(family, tied=False)
    arch, model = architecture_of(folder), built(folder)
    saved = model.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD}).values()
    keys = {tensor.key for tensor in saved if "_extra_state" not in tensor.key}
    assert keys == {stored_parameter(row, arch).key for row in parameter_table(arch)}
    assert any(key.startswith("decoder.layers.1.") for key in keys) is (family == "deepseek_v3")


# --- routers -----------------------------------------------------------------------------------------------------


def chosen_weights(router: Any, hidden: Tensor) -> Tensor:
    """Weight of each expert for each token, [T, experts]; 0 where it is not chosen."""
    weights, _ = router(hidden[:, None])
    return weights


@torch.no_grad()
def test_router_equals_that_of_transformers(layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """On 2,000 tokens, of which biases and groups decide the experts of many."""
    folder = checkpoint("deepseek_v3", tied=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[2].mlp.gate
    router = built(folder).decoder.layers[2].mlp.router
    hidden = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    _, weights, experts = theirs(hidden)
    expected = torch.zeros(2000, 12).scatter(1, experts, weights)
    found = chosen_weights(router, hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(1), torch.full((2000,), 2.5))
    router.config.moe_router_group_topk = None
    without_groups = chosen_weights(router, hidden)
    router.expert_bias.zero_()
    without_biases = chosen_weights(router, hidden)
    for other, reference in ((without_groups, found), (without_biases, without_groups)):
        assert ((other > 0) != (reference > 0)).any(1).float().mean() > 0.2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_biases_of_routers_stay_exact_and_are_not_trained(
    layout: Layout, checkpoint: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    folder = checkpoint("deepseek_v3", tied=False)
    stored = load_file(folder / "model.safetensors")
    biases = {name: tensor for name, tensor in stored.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    config = make_config(folder, training={"precision": precision}, run={"dir": str(tmp_path)})
    policy = Policy(config, layout)
    batch = load_batch(policy)
    batch.set_old_log_probs(policy.log_probs(batch))
    policy.start_step()
    for mini_batch in batch.mini_batches():
        policy.update(mini_batch)
    export_hf(config, policy)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for name, bias in biases.items():
        assert torch.equal(exported[name], bias), name
    router = "model.layers.2.mlp.gate.weight"
    assert not torch.equal(exported[router], stored[router].to(exported[router].dtype))


def test_noise_of_the_weight_check_leaves_biases_alone(layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """Servers get them exactly, too; noise would send tokens to experts that no trained model sends them to."""
    sync = WeightSync.__new__(WeightSync)
    sync._policy = Policy(make_config(checkpoint("deepseek_v3", tied=False)), layout)
    before = {name: tensor.clone() for name, tensor in sync._policy.export()}
    sync._add_noise()
    unchanged = [name for name, tensor in sync._policy.export() if torch.equal(tensor, before[name])]
    assert unchanged == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]


def test_servers_get_biases_of_routers_as_they_are(with_mtp: Path) -> None:
    arch = architecture_of(with_mtp)
    exact = exact_tensors(arch)
    assert exact == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3, 4)}
    plan = plan_of(with_mtp, dtype="bfloat16")
    found = {stretch.name: stretch.dtype for bucket in plan.buckets for stretch in bucket.stretches}
    assert found.keys() == hf_shapes(arch).keys()
    for name, dtype in found.items():
        assert dtype == ("float32" if name in exact else "bfloat16")


# --- Gemma -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_embeddings_of_gemma_are_scaled_in_the_models_precision(
    layout: Layout, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TINY, "hidden_size", 48)  # whose root bf16 rounds
    folder = tiny_model(tmp_path, "gemma")
    model = built(folder, precision)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=model.config.params_dtype).model.embed_tokens
    tokens = torch.arange(50)[None]
    found = model.embedding(input_ids=tokens, position_ids=None)
    assert torch.equal(found[:, 0], theirs(tokens)[0])


@torch.no_grad()
def test_gelu_of_gemma_is_the_tanh_approximation(layout: Layout, checkpoint: Callable[..., Path]) -> None:
    """Around the inputs where it is furthest from the exact function, by 5e-4."""
    folder = checkpoint("gemma")
    hidden = 12 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[0].mlp(hidden)
    found, _ = built(folder).decoder.layers[0].mlp(hidden[:, None])
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=2e-6)


# --- the example of docs/adding_a_model.md ------------------------------------------------------------------------


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its family, registered as its file would be; the name in the test table."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "adding_a_model.md").read_text(), re.DOTALL)
    file, line = blocks[:2]
    module: dict[str, Any] = {}
    exec(compile(file, "seed_oss.py", "exec"), module)
    monkeypatch.setitem(registry._FAMILIES, "SeedOssForCausalLM", module["FAMILY"])
    ((name, values),) = eval("{" + line + "}").items()
    monkeypatch.setitem(TINY_FAMILIES, name, values)
    return str(name)


@pytest.mark.parametrize("tied", [True, False])
def test_documented_example(layout: Layout, tmp_path: Path, documented: str, tied: bool) -> None:
    folder = tiny_model(tmp_path, documented, tied=tied, vocab=151)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert any(name.endswith("q_proj.bias") for name in stored)
    assert hf_shapes(architecture_of(folder)) == stored
    check_log_probs(folder, layout)


# --- multi-token prediction --------------------------------------------------------------------------------------


@pytest.fixture
def with_mtp(tmp_path: Path) -> Path:
    """A checkpoint as DeepSeek's own are; transformers never writes these tensors."""
    return random_checkpoint(tmp_path / "mtp", "deepseek_v3", num_nextn_predict_layers=1)


def test_table_of_multi_token_prediction(with_mtp: Path) -> None:
    arch = architecture_of(with_mtp)
    every, trained = list(parameter_table(arch, extra=True)), list(parameter_table(arch))
    assert every[: len(trained)] == trained
    extra = every[len(trained) :]
    assert all(row.extra and row.layer is None and row.name.startswith("mtp.layers.0.") for row in extra)
    assert not any(row.extra for row in trained)
    names = {row.name.removeprefix("mtp.layers.0."): row.hf_names for row in extra}
    theirs = "model.layers.4."
    for ours, name in {
        "embedding.word_embeddings.weight": "embed_tokens.weight",
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "transformer_layer.input_layernorm.weight": "input_layernorm.weight",
        "transformer_layer.self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "transformer_layer.mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "transformer_layer.mlp.experts.local_experts.10.linear_fc2.weight": "mlp.experts.10.down_proj.weight",
        "transformer_layer.mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
        "final_layernorm.weight": "shared_head.norm.weight",
        "output_layer.weight": "shared_head.head.weight",
    }.items():
        assert names[ours] == (theirs + name,)
    shapes = hf_shapes(arch, extra=True)
    assert shapes[theirs + "eh_proj.weight"] == (arch.hidden_size, 2 * arch.hidden_size)
    assert shapes[theirs + "shared_head.head.weight"] == shapes["lm_head.weight"]
    assert shapes[theirs + "embed_tokens.weight"] == shapes["model.embed_tokens.weight"]
    decoder_layer = {row.name.removeprefix("decoder.layers.3.") for row in trained if row.layer == 3}
    layer = {name.removeprefix("transformer_layer.") for name in names if name.startswith("transformer_layer.")}
    assert layer == decoder_layer


@pytest.mark.parametrize(("tensor", "expert_tensor"), [(1, 1), (2, 3)])
def test_multi_token_prediction_comes_back(with_mtp: Path, tensor: int, expert_tensor: int) -> None:
    stored, reader = load_file(with_mtp / "model.safetensors"), HFReader(with_mtp)
    merged: dict[str, Tensor] = {}
    for row in parameter_table(architecture_of(with_mtp), extra=True):
        size = tensor if row.expert is None else expert_tensor
        shards = [load_shard(row.rule, reader, row.hf_names, rank, size) for rank in range(size)]
        merged |= zip(row.hf_names, merge_shards(row.rule, shards), strict=True)
    assert merged.keys() == stored.keys()
    assert all(torch.equal(merged[name], whole) for name, whole in stored.items())


def test_multi_token_prediction_is_not_trained(layout: Layout, with_mtp: Path) -> None:
    model = built(with_mtp)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert not any(name.startswith("mtp.") for name in names)
    assert len(model.decoder.layers) == 4
