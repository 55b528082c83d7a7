"""An architecture in a layout and a precision as megatron-core's TransformerConfig."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.models.architecture import Architecture, YarnScaling
from dapo_megatron.models.placement import chunk_layers
from dapo_megatron.trainer import device, no_te
from dapo_megatron.trainer.layers import Backend, fusion_fields
from dapo_megatron.trainer.precision import transformer_fields

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def transformer_config(
    arch: Architecture, parallel: ParallelConfig, training: TrainingConfig, backend: Backend
) -> TransformerConfig:
    """Megatron's configuration of `arch` in this layout and precision, with these layers."""
    interleaved = parallel.virtual_pipeline > 1
    fields: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "layernorm_zero_centered_gamma": arch.zero_centered_norms,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,
        "activation_func": ACTIVATIONS[arch.activation],
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "pipeline_model_parallel_layout": _pipeline_layout(arch, parallel),
        "context_parallel_size": parallel.context,
        "cp_comm_type": parallel.context_comm,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        # Two batched transfers between the same pair of ranks mix up their directions: interleaving two stages that
        # way gives wrong gradients without an error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "variable_seq_lengths": not interleaved,  # packed micro-batches differ in length
        "moe_token_dispatcher_type": "alltoall",  # variable lengths over stages ask for it, also without experts
        "calculate_per_token_loss": True,  # gradients are divided by the mini-batch's token count, once
    }
    if arch.num_experts:
        fields |= _expert_fields(arch, training)
    if arch.latent:
        fields |= _latent_fields(arch)
    fields |= fusion_fields(arch, backend, cuda=device.has_cuda(), weight_gradient=no_te.has_fused_weight_gradient())
    kind = MLATransformerConfig if arch.latent else TransformerConfig
    return kind(**fields, **transformer_fields(training), **device.model_config_overrides())


def _pipeline_layout(arch: Architecture, parallel: ParallelConfig) -> list[list[str]] | None:
    """What each model chunk consists of, for megatron; None where its own equal division is meant."""
    if parallel.pipeline_layers is None:
        return None
    chunks = [["decoder"] * len(layers) for layers in chunk_layers(arch.num_layers, parallel)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _expert_fields(arch: Architecture, training: TrainingConfig) -> dict[str, Any]:
    """Routers in fp32, and no token dropped."""
    fields: dict[str, Any] = {
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.expert_ffn_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.norm_topk_prob,  # softmax over the chosen is what normalising them gives
        "moe_router_load_balancing_type": "aux_loss" if training.moe_aux_loss else "none",
        "moe_aux_loss_coeff": training.moe_aux_loss,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": arch.shared_ffn_size or None,
    }
    if not arch.uniform_layers:
        fields["moe_layer_freq"] = [int(arch.has_experts(layer)) for layer in range(arch.num_layers)]
    if router := arch.sigmoid_router:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": router.scale,
        }
        if router.groups > 1:
            fields |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.groups_per_token}
    return fields


def _latent_fields(arch: Architecture) -> dict[str, Any]:
    """Latent attention and its rotary positions, of which megatron makes the softmax's scale as well."""
    assert arch.latent is not None
    fields: dict[str, Any] = {
        "q_lora_rank": arch.latent.query_rank,
        "kv_lora_rank": arch.latent.kv_rank,
        "qk_head_dim": arch.latent.nope_dim,
        "qk_pos_emb_head_dim": arch.latent.rope_dim,
        "v_head_dim": arch.latent.value_dim,
        "rotary_base": arch.rope_theta,
        "rope_type": "rope",
    }
    if isinstance(scaling := arch.rope_scaling, YarnScaling):
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return fields
