"""Operations counted from dimensions against those that torch counts while transformers' models run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.flops import forward_flops, generation_flops, layer_parameters, training_flops
from dapo_megatron.models.registry import architecture_of
from tests.models import TINY_FAMILIES

FAMILIES = sorted(TINY_FAMILIES)
LATENT = {family for family in FAMILIES if family.startswith("deepseek")}
# Qwen2.5-32B.
QWEN_32B = Architecture(
    hf_class="Qwen2ForCausalLM",
    num_layers=64,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=27648,
    vocab_size=152064,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=32768,
    tied_embeddings=False,
    qkv_bias=True,
)


def load(folder: Path) -> Any:
    """The model with matrix products that torch's counter sees: no fused attention, no grouped experts."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def counted(model: Any, run: Callable[[], Any]) -> int:
    """Operations of `run`, without the rotations' angles, a product of positions with frequencies."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_module = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - angles


def masked(arch: Architecture, length: int) -> int:
    """Operations that eager attention spends on positions after a token's own: n (n - 1) / 2 pairs."""
    return arch.num_layers * arch.num_heads * (arch.head_dim + arch.value_dim) * length * (length - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_pass(checkpoint: Callable[..., Path], family: str) -> None:
    folder = checkpoint(family, tied=False)
    model, arch = load(folder), architecture_of(folder)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        whole = counted(model, lambda: model(ids))
        last = counted(model, lambda: model(ids, logits_to_keep=7))
    assert forward_flops(arch, np.array([40])) == whole - masked(arch, 40)
    assert forward_flops(arch, np.array([40]), targets=np.array([7])) == last - masked(arch, 40)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - LATENT))
def test_generation(checkpoint: Callable[..., Path], family: str) -> None:
    """Token by token with a cache: nothing of it is masked, so the counts are equal.

    Latent attention is left out: transformers caches its small vectors and expands all of them anew for every token.
    """
    folder = checkpoint(family, tied=False)
    model, arch = load(folder), architecture_of(folder)

    def generate() -> None:
        outputs = model(torch.arange(9)[None], logits_to_keep=1, use_cache=True)
        for token in range(4):  # the fifth is sampled and never fed back
            outputs = model(torch.tensor([[token]]), past_key_values=outputs.past_key_values, use_cache=True)

    with torch.no_grad():
        operations = counted(model, generate)
    assert generation_flops(arch, np.array([9]), np.array([5])) == operations - masked(arch, 9)


def test_backward_pass_is_twice_the_forward_pass(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", tied=False)
    model, arch = load(folder), architecture_of(folder)
    operations = counted(model, lambda: model(torch.arange(30)[None]).logits.sum().backward())
    assert training_flops(arch, np.array([30])) == operations - 3 * masked(arch, 30)


def test_full_recomputation_is_a_fourth_forward_pass() -> None:
    lengths, targets = np.array([100, 200]), np.array([10, 20])
    forward = forward_flops(QWEN_32B, lengths, targets=targets)
    assert training_flops(QWEN_32B, lengths, targets=targets) == 3 * forward
    assert training_flops(QWEN_32B, lengths, targets=targets, recompute=True) == 4 * forward


def test_sequences_add_up_and_do_not_see_each_other() -> None:
    lengths = np.array([3, 500, 65_536], np.int32)  # whose square overflows 32 bits
    apart = [forward_flops(QWEN_32B, lengths[i : i + 1]) for i in range(3)]
    assert forward_flops(QWEN_32B, lengths) == pytest.approx(sum(apart), rel=1e-15)
    assert forward_flops(QWEN_32B, np.array([66_039])) > 1.002 * sum(apart)
    assert forward_flops(QWEN_32B, np.array([], np.int32)) == 0.0


def test_rule_of_six_operations_per_parameter_and_token() -> None:
    """6 N D (arXiv 2001.08361), N without the input embedding; attention over 1,024 tokens adds 1 %."""
    parameters = QWEN_32B.num_layers * layer_parameters(QWEN_32B) + QWEN_32B.vocab_size * QWEN_32B.hidden_size
    assert parameters == pytest.approx(32e9, rel=0.01)
    lengths = np.full(64, 1024)
    assert training_flops(QWEN_32B, lengths) == pytest.approx(6 * parameters * lengths.sum(), rel=0.015)


def test_mixture_counts_active_experts_and_the_router() -> None:
    mixture = replace(QWEN_32B, num_experts=128, experts_per_token=8, expert_ffn_size=QWEN_32B.ffn_size // 8)
    assert layer_parameters(mixture) == layer_parameters(QWEN_32B)
    router = 2 * 64 * 5120 * 128
    assert forward_flops(mixture, np.array([1])) - forward_flops(QWEN_32B, np.array([1])) == router


def test_layers_with_and_without_experts_count_as_they_are(checkpoint: Callable[..., Path]) -> None:
    """One of four layers is dense, with an MLP of 96; the others have 4 active and 2 shared experts of 24."""
    arch = architecture_of(checkpoint("deepseek_v3", tied=False))
    all_dense = replace(arch, num_experts=0)
    assert layer_parameters(all_dense) - layer_parameters(arch) == 3 / 4 * 3 * 64 * (96 - (4 + 2) * 24)


def test_generation_of_nothing_costs_nothing() -> None:
    assert generation_flops(QWEN_32B, np.array([700]), np.array([0])) == 0.0
    one = generation_flops(QWEN_32B, np.array([700]), np.array([1]))
    assert one == forward_flops(QWEN_32B, np.array([700]), targets=np.array([1]))


def test_generation_needs_a_prompt_for_every_answer() -> None:
    with pytest.raises(ValueError, match="every answer needs its prompt's length"):
        generation_flops(QWEN_32B, np.array([7]), np.array([1, 2]))
