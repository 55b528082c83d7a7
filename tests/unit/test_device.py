"""megatron-core without CUDA: each replacement is needed, does what its caller expects, and leaves torch alone."""

import importlib
import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import dapo_megatron.trainer  # noqa: F401  (adapts megatron-core before it is imported below)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from config_helpers import LLAMA
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.utils import local_multi_tensor_l2_norm

from dapo_megatron.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
from dapo_megatron.models.architecture import Architecture, LatentAttention
from dapo_megatron.models.families import llama
from dapo_megatron.run_state.writer import write_in_process
from dapo_megatron.trainer import device
from dapo_megatron.trainer.build import PolicyModel, build_model
from dapo_megatron.trainer.optimizer import build_optimizer, wrap_data_parallel
from dapo_megatron.trainer.parallel import Layout
from tests.models import REPOSITORY

pytestmark = pytest.mark.usefixtures("layout")

NO_CUDA = (AssertionError, RuntimeError)  # what torch raises, and what a probe raises that got a wrong result


def training_in(precision: str) -> TrainingConfig:
    return TrainingConfig.model_validate({"precision": precision})


def tiny(precision: str = "fp32", arch: Architecture | None = None) -> PolicyModel:
    arch = arch or llama.architecture(LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True})
    (model,) = build_model(arch, ParallelConfig.model_validate({}), training_in(precision), temperature=1.0)
    return model


def wrapped(precision: str = "fp32") -> DistributedDataParallel:
    (model,) = wrap_data_parallel([tiny(precision)], training_in(precision))
    return model


def optimize(precision: str) -> None:
    model = wrapped(precision)
    masters = {name: p.detach().float() for name, p in model.module.named_parameters()}
    training = training_in(precision)
    optimizer = build_optimizer([model], OptimizerConfig.model_validate({}), training, [masters])
    assert float(optimizer.get_loss_scale()) == 1.0


class TwoRanks:
    """A process group of two ranks, of which this is the first."""

    def size(self) -> int:
        return 2


def gather_a_sequence(_: Path) -> None:
    with patch.object(mappings, "dist_all_gather_func", lambda out, part, group: out.copy_(torch.cat([part, part]))):
        gathered = mappings._gather_along_first_dim(torch.ones(2, 3), TwoRanks())
    assert gathered.tolist() == torch.ones(4, 3).tolist()


def backward_through_a_split_sequence(_: Path) -> None:
    hidden, weight = torch.ones(2, 3, requires_grad=True), torch.nn.Parameter(torch.ones(4, 3))
    out = linear_with_grad_accumulation_and_async_allreduce(
        hidden, weight, None, False, False, True, tp_group=dist.group.WORLD
    )
    out.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == torch.full((2, 3), 4.0).tolist()


def route_tokens(_: Path) -> None:
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # made once per process
    arch = replace(
        llama.architecture(LLAMA | {"num_hidden_layers": 1}), num_experts=4, experts_per_token=2, expert_ffn_size=8
    )
    experts = tiny(arch=arch).decoder.layers[0].mlp
    torch.nn.init.normal_(experts.router.weight)
    output, _bias = experts(torch.randn(5, 1, arch.hidden_size))
    assert output.norm() > 0


def scale_losses(_: Path) -> None:
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 1000, 1)
    scaler.update(found_inf=True)
    other = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 1000, 1)
    other.load_state_dict(scaler.state_dict())
    assert other.scale.tolist() == [2.0]


def track_random_state(_: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tracker = CudaRNGStatesTracker()
    tracker.add("test", 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(tracker.get_states()["test"], torch.Generator().manual_seed(5).get_state())


def fork_random_state(_: Path) -> None:
    """What recompute does: draw from another state, then go on as if nothing had been drawn."""
    tracker = CudaRNGStatesTracker()
    tracker.add("test", 5)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    with tracker.fork("test"):
        drawn = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(5)))


def allocate_buffers(_: Path) -> None:
    assert wrapped().buffers[0].grad_data.device == torch.device("cpu")


def norm_without_gradients(_: Path) -> None:
    assert get_grad_norm_fp32([], grad_stats_parallel_group=dist.group.WORLD) == 0.0


def count_tokens(_: Path) -> None:
    model = wrapped()
    weight = model.module.embedding.word_embeddings.weight
    schedule = get_forward_backward_func()
    losses = schedule(
        forward_step_func=lambda data, model: (
            weight.sum(),
            lambda output: (output * 0, torch.tensor(next(data), dtype=torch.int), output.detach()),
        ),
        data_iterator=iter([3]),
        model=[model],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    assert len(losses) == 1


def talk_between_stages(_: Path) -> None:
    communicator = P2PCommunicator(dist.group.WORLD, tiny().config)
    received = communicator._communicate(
        tensor_send_next=None, tensor_send_prev=None, recv_prev=False, recv_next=False, tensor_shape=(1, 1, 8)
    )
    assert received[:2] == (None, None)


def norm_of_list(_: Path) -> None:
    norm, _unused = local_multi_tensor_l2_norm(0, None, [[torch.tensor([3.0]), torch.tensor([4.0])]], False)
    assert norm.tolist() == [5.0]


def save(folder: Path) -> None:
    write_in_process()
    state = {"x": ShardedTensor.from_rank_offsets("x", torch.arange(3.0))}
    dist_checkpointing.save(state, str(folder))
    loaded = dist_checkpointing.load({"x": ShardedTensor.from_rank_offsets("x", torch.zeros(3))}, str(folder))
    assert loaded["x"].tolist() == [0.0, 1.0, 2.0]


Probe = Callable[[Path], None]

PROBES: dict[str, Probe] = {
    "megatron.core.tensor_parallel.mappings": gather_a_sequence,
    "megatron.core.tensor_parallel.layers": backward_through_a_split_sequence,
    "megatron.core.transformer.moe.router": route_tokens,
    "megatron.core.transformer.moe.token_dispatcher": route_tokens,
    "megatron.core.optimizer.grad_scaler": scale_losses,
    "megatron.core.tensor_parallel.random": track_random_state,
    "megatron.core.distributed.param_and_grad_buffer": allocate_buffers,
    "megatron.core.optimizer.clip_grads": norm_without_gradients,
    "megatron.core.optimizer.optimizer": lambda _: optimize("fp32"),
    "megatron.core.pipeline_parallel.schedules": count_tokens,
    "megatron.core.pipeline_parallel.p2p_communication": talk_between_stages,
    "megatron.core.utils": norm_of_list,
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": save,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": save,
}


@pytest.mark.parametrize("name", device.PATCHED_MODULES)
def test_each_patched_module_needs_the_stand_in(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    works, fails = tmp_path / "works", tmp_path / "fails"
    works.mkdir()
    fails.mkdir()
    PROBES[name](works)
    monkeypatch.setattr(importlib.import_module(name), "torch", torch)
    with pytest.raises(NO_CUDA):
        PROBES[name](fails)


def stand_in() -> types.ModuleType:
    return importlib.import_module("megatron.core.utils").torch


def replaced(module: types.ModuleType) -> set[str]:
    return {name for name in vars(module) if not name.startswith("_")}


REPLACEMENTS: dict[str, Probe] = {
    "zeros": norm_without_gradients,
    "tensor": norm_of_list,
    "cuda.current_device": allocate_buffers,
    "cuda.synchronize": talk_between_stages,
    "cuda.get_rng_state": track_random_state,
    "cuda.manual_seed": track_random_state,
    "cuda.random": fork_random_state,
    "cuda.Stream": route_tokens,
    "cuda.current_stream": route_tokens,
}

# Needed where ranks have different numbers of tokens for an expert that is split over them: the layouts with ETP2 in
# tests/distributed/test_layouts.py.
UNEQUAL = {"distributed.all_gather", "distributed.reduce_scatter"}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_each_replaced_function_is_needed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, _, function = name.rpartition(".")
    monkeypatch.delattr(stand_in().cuda if module else stand_in(), function)
    with pytest.raises(NO_CUDA):
        REPLACEMENTS[name](tmp_path)


def test_nothing_else_is_replaced() -> None:
    inner = {module: replaced(getattr(stand_in(), module)) for module in ("cuda", "distributed")}
    names = replaced(stand_in()) - inner.keys() | {f"{module}.{name}" for module in inner for name in inner[module]}
    assert names == set(REPLACEMENTS) | UNEQUAL
    assert set(device.PATCHED_MODULES) == set(PROBES)


def test_counts_of_tokens_are_arrays_to_collectives() -> None:
    counts = torch.tensor([3, 4])
    assert device._counts_on_cpu(counts, as_numpy=True).tolist() == [3, 4]
    assert isinstance(device._counts_on_cpu(counts, as_numpy=True), np.ndarray)
    assert device._counts_on_cpu(counts) is counts
    assert device._counts_on_cpu(None, as_numpy=True) is None


def test_random_state_is_restored_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """megatron's own function queues the call for a CUDA start that never comes."""
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    monkeypatch.setattr(
        module, "_set_cuda_rng_state", original("megatron.core.tensor_parallel.random", "_set_cuda_rng_state")
    )
    with pytest.raises(AssertionError):
        track_random_state(tmp_path)


def test_latent_attention_is_allocated_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small = LatentAttention(query_rank=None, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8)
    arch = replace(llama.architecture(LLAMA | {"num_hidden_layers": 1}), latent=small, num_kv_heads=9)
    attention = tiny(arch=arch).decoder.layers[0].self_attention
    assert all(parameter.device == torch.device("cpu") for parameter in attention.parameters())
    monkeypatch.setattr(multi_latent_attention, "RotaryEmbedding", RotaryEmbedding)
    with pytest.raises(NO_CUDA):
        tiny(arch=arch)


def original(module: str, qualified: str) -> types.FunctionType:
    """A function as megatron-core ships it, from a second copy of its module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    found = fresh
    for part in qualified.split("."):
        found = getattr(found, part)
    return getattr(found, "__func__", found)


def clip(_: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))


def share_embedding(_: Path) -> None:
    model = tiny()
    before = model.embedding.word_embeddings.weight.detach().clone()
    model.config.pipeline_model_parallel_size, model.embd_group = 2, dist.group.WORLD
    model.setup_embeddings_and_output_layer()
    assert torch.equal(model.embedding.word_embeddings.weight, before)


REWRITTEN: dict[str, list[Probe]] = {
    "DistributedOptimizer._build_model_and_main_param_groups": [lambda _: optimize("fp32"), lambda _: optimize("bf16")],
    "clip_grad_by_total_norm_fp32": [clip],
    "LanguageModule.setup_embeddings_and_output_layer": [share_embedding],
}


@pytest.mark.parametrize(("module", "qualified"), device.TYPE_CHECKS + device.MOVES)
def test_each_rewritten_function_is_needed(
    module: str, qualified: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for probe in REWRITTEN[qualified]:
        probe(tmp_path)
    monkeypatch.setattr(device._function(module, qualified), "__code__", original(module, qualified).__code__)
    for probe in REWRITTEN[qualified]:
        with pytest.raises((*NO_CUDA, TypeError)):
            probe(tmp_path)


def test_rewriting_notices_a_changed_megatron() -> None:
    def without_cuda() -> str:
        return "torch.FloatTensor"

    with pytest.raises(RuntimeError, match="megatron-core has changed"):
        device._expect_cpu_types(without_cuda)
    with pytest.raises(RuntimeError, match="megatron-core has changed"):
        device._stay_on_cpu(without_cuda)


def test_import_is_idempotent() -> None:
    before = stand_in()
    code = clip_grad_by_total_norm_fp32.__code__
    device.import_megatron()
    assert stand_in() is before
    assert clip_grad_by_total_norm_fp32.__code__ is code


def in_fresh_interpreter(script: str) -> str:
    """stdout and stderr of a script, which must succeed."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


UNTOUCHED = """
import torch, types
spaces = {space: dict(vars(space)) for space in (torch, torch.cuda, torch.cuda.random, torch.Tensor)}
import dapo_megatron.run_state.checkpoint  # the one module outside trainer/ that imports megatron-core
changed = [name for space, before in spaces.items() for name in before if vars(space)[name] is not before[name]]
assert not changed, changed
for refused in (lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda(), torch.cuda.current_device):
    try:
        refused()
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit("torch pretends to have CUDA")
from megatron.core.fusions.fused_bias_swiglu import swiglu
assert type(swiglu) is types.FunctionType and not hasattr(swiglu, "_torchdynamo_orig_callable"), "compiled"
assert hasattr(torch.compile(lambda x: x), "_torchdynamo_orig_callable"), "torch.compile is gone"
"""


def test_torch_itself_is_untouched_and_the_import_is_silent() -> None:
    assert "Transformer Engine" not in in_fresh_interpreter(UNTOUCHED)


def test_rotary_tables_of_transformers_are_right() -> None:
    """Replaced factories in torch's own namespace corrupt them without an error."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, rope_theta=1e4
    )
    frequencies = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 1e4 ** -(torch.arange(0, 8, 2) / 8))


WITH_CUDA = """
import torch
torch.cuda.is_available = lambda: True  # what a machine with CUDA answers
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device: (9, 0)
import importlib, inspect
from dapo_megatron.run_state.writer import write_in_process
from dapo_megatron.trainer import device
device.import_megatron()
for name in device.PATCHED_MODULES:
    assert importlib.import_module(name).torch is torch, name
for place in device.TYPE_CHECKS:
    assert "torch.cuda.FloatTensor" in str(device._function(*place).__code__.co_consts), place
for place in device.MOVES:
    assert "cuda" in device._function(*place).__code__.co_names, place
random = importlib.import_module("megatron.core.tensor_parallel.random")
assert random._set_cuda_rng_state.__module__ == random.__name__
assert device.current_device() == torch.device("cuda:0")
"""


def test_nothing_is_replaced_where_cuda_is() -> None:
    in_fresh_interpreter(WITH_CUDA)


def test_answers_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.backend() == "gloo"
    assert device.current_device() == torch.device("cpu")
    assert device.model_config_overrides() == {"use_cpu_initialization": True}
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert device.backend() == "nccl"
    assert device.model_config_overrides() == {}


def test_parameters_are_allocated_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(parameter.device == torch.device("cpu") for parameter in tiny().parameters())
    monkeypatch.setattr(device, "model_config_overrides", dict)
    with pytest.raises(NO_CUDA):
        tiny()


def test_rank_takes_its_share_of_the_cores(layout: Layout) -> None:
    before = torch.get_num_threads()
    device.set_device(layout.rank, before + 1)
    try:
        assert torch.get_num_threads() == before + 1
    finally:
        device.set_device(layout.rank, before)
