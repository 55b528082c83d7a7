"""One way to build the model: architecture -> TransformerConfig -> PolicyModel, and weights in and out of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.layout import check_layout
from dapo_megatron.models.sharding import Reader
from dapo_megatron.models.table import EMBEDDING, FINAL_NORM, OUTPUT, Parameter, dense_table, hf_shapes
from dapo_megatron.trainer import device
from dapo_megatron.trainer.attention import PackedCoreAttention, PackedRotary, RMSNorm
from dapo_megatron.trainer.log_probs import token_log_probs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Targets:
    """Which tokens' log-probs the model returns: `index` int64 [n] into the packed batch, `tokens` int64 [n]."""

    index: Tensor
    tokens: Tensor


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage returns log-probs and entropy of target tokens, never whole logits."""

    temperature: float
    log_prob_chunk: int
    arch: Architecture

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return token_log_probs(
            hidden_states[:, 0].index_select(0, labels.index),
            weight,
            labels.tokens,
            vocab_size=self.arch.vocab_size,
            temperature=self.temperature,
            chunk=self.log_prob_chunk,
            group=parallel_state.get_tensor_model_parallel_group(),
        )


def transformer_config(arch: Architecture, parallel: ParallelConfig, training: TrainingConfig) -> TransformerConfig:
    """Megatron's configuration of `arch` in this layout and precision."""
    dtype = DTYPES[training.precision]
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=training.precision == "bf16",
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # variable lengths over pipeline stages ask for it, also without experts
        calculate_per_token_loss=True,  # gradients are divided by the mini-batch's token count, once
        **device.model_config_overrides(),
    )


def build_model(
    arch: Architecture, parallel: ParallelConfig, training: TrainingConfig, *, temperature: float
) -> PolicyModel:
    """This rank's part of the model, with random weights, in the training precision, on the rank's device.

    Raises:
        UserError: if the layout does not fit the model.
    """
    check_layout(arch, parallel.tensor, parallel.pipeline, arch.hf_class)
    config = transformer_config(arch, parallel, training)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    layers = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=arch.padded_vocab(parallel.tensor),
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(arch.rope_theta),
    )
    model.rotary_pos_emb = PackedRotary(arch.head_dim, arch.rope_theta)
    model.arch, model.temperature, model.log_prob_chunk = arch, temperature, training.log_prob_chunk
    model.to(device=device.current_device(), dtype=DTYPES[training.precision])
    return model


def local_rows(model: PolicyModel) -> Iterator[tuple[str, Parameter]]:
    """(name of the local parameter, table row) for the rows whose parameters this rank's stage holds."""
    offset = get_transformer_layer_offset(model.config)
    held = dict(model.named_parameters())
    for row in dense_table(model.arch):
        name = row.name
        if row.layer is not None:
            name = name.replace(f"layers.{row.layer}.", f"layers.{row.layer - offset}.", 1)
            if not 0 <= row.layer - offset < len(model.decoder.layers):
                continue
        elif row.name == EMBEDDING and not model.pre_process and model.post_process and OUTPUT in held:
            name = OUTPUT  # the last stage's copy of tied embeddings
            if not model.arch.tied_embeddings:
                continue
        if name in held:
            yield name, row


@torch.no_grad()
def load_weights(model: PolicyModel, read: Reader) -> dict[str, Tensor]:
    """Fill the local parameters from a Hugging Face checkpoint, reading only this rank's stretches.

    Returns:
        The local shards in the precision of the source, by local parameter name, for the optimizer's masters.

    Raises:
        UserError: if the checkpoint lacks a tensor or one has another shape than config.json says.
    """
    parameters = dict(model.named_parameters())
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    shapes = hf_shapes(model.arch)
    shards: dict[str, Tensor] = {}
    for name, row in local_rows(model):
        for hf_name in row.hf_names:  # stretches of a tensor that is too large would fit
            if read.shape(hf_name) != shapes[hf_name]:
                raise UserError(
                    f"model.path: {hf_name} has the shape {read.shape(hf_name)}, "
                    f"but config.json asks for {shapes[hf_name]}"
                )
        shards[name] = row.rule.load(read, row.hf_names, rank, size)
        parameters.pop(name).copy_(shards[name])
    if parameters:
        raise RuntimeError(f"no row of the parameter table fills {sorted(parameters)}")
    return shards


@torch.no_grad()
def export_weights(
    model: PolicyModel, value: Callable[[torch.nn.Parameter], Tensor] = lambda parameter: parameter.data
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor), one parameter at a time, on every rank of one model replica.

    A collective over the replica's tensor- and pipeline-parallel groups: each of its ranks must consume it.

    Args:
        model: this rank's part.
        value: what to export of a parameter, of its shape (its data; a test exports its gradient).
    """
    held = {row.name: name for name, row in local_rows(model) if not (row.name == EMBEDDING and name == OUTPUT)}
    parameters = dict(model.named_parameters())
    dtype = value(next(model.parameters())).dtype
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    for row in dense_table(model.arch):
        whole: list[Tensor] | None = None
        if row.name in held:
            shard = value(parameters[held[row.name]]).contiguous()
            whole = row.rule.merge(_gather(shard, tensor_group) if row.rule.tensor_parallel else [shard])
        if pipeline_group.size() > 1:
            whole = _broadcast_from_stage(whole, row, model.arch, dtype, pipeline_group)
        assert whole is not None
        yield from zip(row.hf_names, whole, strict=True)


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return shards


def _broadcast_from_stage(
    tensors: list[Tensor] | None, row: Parameter, arch: Architecture, dtype: torch.dtype, group: dist.ProcessGroup
) -> list[Tensor]:
    """Give every pipeline stage the tensors that one of them holds."""
    per_stage = arch.num_layers // group.size()
    stage = row.layer // per_stage if row.layer is not None else 0
    if row.name in (FINAL_NORM, OUTPUT):
        stage = group.size() - 1
    shapes = hf_shapes(arch)
    source = dist.get_global_rank(group, stage)
    received = []
    for i, name in enumerate(row.hf_names):
        tensor = (
            tensors[i].contiguous()
            if tensors is not None
            else torch.empty(shapes[name], dtype=dtype, device=device.current_device())
        )
        dist.broadcast(tensor, source, group=group)
        received.append(tensor)
    return received
