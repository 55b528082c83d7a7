"""Which modules a decoder layer is made of: megatron-core's with our attention and norms, or Transformer Engine's."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from dapo_megatron.config.precision_rules import TE_PRECISIONS
from dapo_megatron.config.training import TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.trainer import device, no_te
from dapo_megatron.trainer.attention import PackedCoreAttention, RMSNorm
from dapo_megatron.trainer.latent_attention import LatentSelfAttention
from dapo_megatron.trainer.router import ReplayedRouter

Backend = Literal["te", "local"]

INSTALL_TE = "run `pip install 'transformer-engine[pytorch]'` on a machine with CUDA, or use NVIDIA's PyTorch image"


def resolve_backend(training: TrainingConfig) -> Backend:
    """The layers to build: Transformer Engine's where it is usable and has kernels for the precision.

    Raises:
        UserError: if Transformer Engine's layers or FP8, which only they have, are asked for and cannot be had.
    """
    usable = device.has_cuda() and no_te.has_te()
    if training.layer_backend == "te" and not usable:
        raise UserError(f"training.layer_backend=te needs Transformer Engine: {INSTALL_TE}; or use auto or local")
    fits = training.layer_backend != "local" and training.precision in TE_PRECISIONS
    backend: Backend = "te" if usable and fits else "local"
    if training.precision == "fp8" and backend == "local":
        allow = "use training.layer_backend=auto" if usable else f"{INSTALL_TE}, or use training.precision=bf16"
        raise UserError(f"training.precision=fp8 needs Transformer Engine's layers: {allow}")
    return backend


def block_spec(arch: Architecture, backend: Backend, layers: range) -> TransformerBlockSubmodules:
    """The layers of a model chunk, by their numbers in the whole model, and the final norm."""
    build = te_layer_spec if backend == "te" else local_layer_spec
    specs = {experts: build(arch, experts=experts) for experts in {arch.has_experts(layer) for layer in layers}}
    norm = gpt_layer_specs.TENorm if backend == "te" else RMSNorm
    return TransformerBlockSubmodules(layer_specs=[specs[arch.has_experts(layer)] for layer in layers], layer_norm=norm)


def _spec_fields(arch: Architecture, *, experts: bool) -> dict[str, Any]:
    """What megatron-core's functions that make layers want to know of either backend's."""
    return {
        "num_experts": arch.num_experts if experts else None,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,
        "multi_latent_attention": arch.latent is not None,
    }


def local_layer_spec(arch: Architecture, *, experts: bool) -> ModuleSpec:
    """A decoder layer without Transformer Engine: megatron-core's linears and experts, our attention and norms.

    Its parameter names are those of the parameter table (`models/table.py`); its checkpoint keys are those of
    Transformer Engine's layer, so that a run state moves between the two.
    """
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        **_spec_fields(arch, experts=experts), moe_grouped_gemm=False, normalization="RMSNorm"
    )
    layer, attention = spec.submodules, spec.submodules.self_attention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.submodules.core_attention = PackedCoreAttention
    fused = {"pre_mlp_layernorm.": "mlp.linear_fc1."}  # norms that Transformer Engine fuses into linears
    if arch.latent:
        attention.module = LatentSelfAttention
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = RMSNorm
        fused |= {f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj." for x in ("q", "kv")}
    else:
        fused |= {"input_layernorm.": "self_attention.linear_qkv."}
    if arch.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    if experts:  # not in front of a router
        del fused["pre_mlp_layernorm."]
        layer.mlp.submodules.router = ReplayedRouter
    layer.sharded_state_dict_keys_map = {name: linear + "layer_norm_" for name, linear in fused.items()}
    return spec


def te_layer_spec(arch: Architecture, *, experts: bool) -> ModuleSpec:
    """A decoder layer of Transformer Engine: norms fused into the linears behind them, experts in grouped products."""
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        **_spec_fields(arch, experts=experts), moe_grouped_gemm=experts
    )
    if experts:
        spec.submodules.mlp.submodules.router = ReplayedRouter
    return spec


def te_packed(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Describe packed sequences to Transformer Engine's attention and rotary kernels.

    Args:
        lengths: tokens of each sequence over all context-parallel ranks, with the padding at its end. The padding
            counts as part of its sequence: attention is causal, so nothing real sees it. The lengths with and without
            padding are thereby the same to the kernels, and flash attention, which cannot skip padding between
            sequences, stays usable.
        device: where the offsets are put.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def fusion_fields(arch: Architecture, backend: Backend, *, cuda: bool, weight_gradient: bool) -> dict[str, Any]:
    """Fields of TransformerConfig that join kernels: what the backend has, and nothing on a CPU.

    Args:
        arch: the model.
        backend: whose layers are built.
        cuda: whether this rank computes on a GPU, where torch.compile makes one kernel of SwiGLU, and one of adding
            the residual.
        weight_gradient: whether apex's kernel is there that adds weight gradients to the fp32 buffers. Megatron's own
            linears (the output layer, with either backend) refuse to be built without it.
    """
    te = backend == "te"
    return {
        "bias_activation_fusion": cuda and arch.activation == "silu",  # torch's own tanh GELU is no name to megatron
        "bias_dropout_fusion": cuda,
        "gradient_accumulation_fusion": cuda and weight_gradient,
        "apply_rope_fusion": te and arch.latent is None,  # that of latent attention rounds its angles' sines first
        "moe_grouped_gemm": te,
        "moe_permute_fusion": te,
    }
