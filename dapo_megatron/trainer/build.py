"""One way to build a model: architecture -> PolicyModel or ValueModel, and weights in and out."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_megatron.config.training import ParallelConfig, TrainingConfig
from dapo_megatron.errors import UserError
from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.layout import check_layout
from dapo_megatron.models.parameters import EMBEDDING, OUTPUT, Parameter
from dapo_megatron.models.placement import Placement
from dapo_megatron.models.sharding import Reader, load_shard, merge_shards
from dapo_megatron.models.table import hf_shapes, parameter_table
from dapo_megatron.trainer import device
from dapo_megatron.trainer.layers import Backend, block_spec, resolve_backend
from dapo_megatron.trainer.log_probs import token_log_probs
from dapo_megatron.trainer.model_config import transformer_config
from dapo_megatron.trainer.precision import high_precision
from dapo_megatron.trainer.rotary import LatentRotary, PackedRotary, inverse_frequencies


@dataclass(frozen=True)
class Targets:
    """The tokens whose log-probs or values a model returns: `tokens` int64 [n] and `index` int64 [n], the places in the
    packed batch after which they come.
    """

    index: Tensor
    tokens: Tensor


class ModelChunk(GPTModel):  # type: ignore[misc]
    """All layers of a model, a pipeline stage's, or one of several stretches of layers on a stage (`vp_stage`).

    `arch` is what the parameter table is made from.
    """

    arch: Architecture
    parallel: ParallelConfig
    backend: Backend


class PolicyModel(ModelChunk):
    """A GPTModel whose last stage returns log-probs and entropy of target tokens, never whole logits."""

    temperature: float
    log_prob_chunk: int

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        group = parallel_state.get_tensor_model_parallel_group()
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        elif group.size() > 1:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return token_log_probs(
            hidden_states[:, 0].index_select(0, labels.index),
            weight,
            labels.tokens,
            vocab_size=self.arch.vocab_size,
            temperature=self.temperature,
            chunk=self.log_prob_chunk,
            group=group,
        )


class ValueModel(ModelChunk):
    """A GPTModel whose last stage returns values: V_t of the state in which the target token t is chosen.

    That is a linear function of the hidden state from which the policy would compute the log-probs of t. It has no
    output layer for the vocabulary, and tied embeddings are no longer tied to anything.
    """

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        values = self.output_layer(hidden_states[:, 0])
        if self.config.sequence_parallel:
            # Every rank computes the whole loss from all values: the gradient of its own share is there already.
            group = parallel_state.get_tensor_model_parallel_group()
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
        return values.index_select(0, labels.index)


class ValueHead(torch.nn.Module):
    """From hidden states to values, the same on all tensor-parallel ranks. Values start at exactly 0.

    The weight [1, H] is stored in the model's precision, with an fp32 master as all have, and the arithmetic is fp32.
    An fp32 weight beside 16-bit ones would have a gradient buffer of its own, in which a data rank may have no part:
    megatron's optimizer cannot save that.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device.current_device()))
        # Ranks then see parts of the tokens, and megatron adds up their gradients.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values fp32 [T] (fp64 where the model is) of hidden states [T, H]."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return torch.mv(hidden.to(dtype), self.weight[0].to(dtype))


Chunk = TypeVar("Chunk", bound=ModelChunk)


def build_model(
    arch: Architecture, parallel: ParallelConfig, training: TrainingConfig, *, temperature: float
) -> list[PolicyModel]:
    """This rank's chunks of the policy, with random weights, in the training precision, on the rank's device.

    Raises:
        UserError: if the layout does not fit the model.
    """
    chunks = build_chunks(PolicyModel, arch, parallel, training)
    for model in chunks:
        model.temperature, model.log_prob_chunk = temperature, training.log_prob_chunk
    return chunks


def build_value_model(arch: Architecture, parallel: ParallelConfig, training: TrainingConfig) -> list[ValueModel]:
    """This rank's chunks of a critic: as `build_model`, but for the last stage's head of zeros."""
    chunks = build_chunks(ValueModel, replace(arch, tied_embeddings=False), parallel, training)
    for model in chunks:
        if model.post_process:  # megatron's output layer goes before anything else needs its memory
            model.output_layer = ValueHead(
                arch.hidden_size, model.config.params_dtype, sequence_parallel=parallel.sequence
            )
        model.arch = replace(arch, tied_embeddings=True)  # whose table has no row for an output layer either
    return chunks


def build_chunks(
    kind: type[Chunk], arch: Architecture, parallel: ParallelConfig, training: TrainingConfig
) -> list[Chunk]:
    """This rank's chunks of a model of `kind`, with random weights; see `build_model`."""
    check_layout(arch, parallel, arch.hf_class)
    backend = resolve_backend(training)
    config = transformer_config(arch, parallel, training, backend)
    chunks = []
    for i in range(parallel.virtual_pipeline):
        vp_stage = i if parallel.virtual_pipeline > 1 else None
        stage: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = kind(
            config=config,
            transformer_layer_spec=block_spec(arch, backend, _layers(config, vp_stage)),
            vocab_size=arch.padded_vocab(parallel.tensor),
            max_sequence_length=arch.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            vp_stage=vp_stage,
        )
        model.arch, model.parallel, model.backend = arch, parallel, backend
        set_rotary(model)
        if model.pre_process and arch.scaled_embeddings:
            model.embedding.register_forward_hook(_scale_embeddings)
        model.to(device=device.current_device(), dtype=config.params_dtype)
        _separate_experts(model)
        _keep_biases_exact(model)
        chunks.append(model)
    return chunks


def _layers(config: TransformerConfig, vp_stage: int | None) -> range:
    """The layers of this rank's chunk, by their numbers in the whole model."""
    first = get_transformer_layer_offset(config, vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage))


def set_rotary(model: ModelChunk) -> None:
    """Give a chunk the rotary positions of its architecture where megatron's own would not do."""
    if model.backend == "local" and model.arch.latent:
        for layer in model.decoder.layers:
            layer.self_attention.rotary_pos_emb = LatentRotary(model.arch)
    elif model.backend == "local":
        model.rotary_pos_emb = PackedRotary(model.arch)
    elif model.arch.rope_scaling and not model.arch.latent:  # megatron knows Llama 3's with fixed numbers only
        model.rotary_pos_emb.inv_freq = inverse_frequencies(model.arch).to(device.current_device())


def _scale_embeddings(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Multiply by sqrt(hidden_size), rounded to the model's precision first as transformers does."""
    return output * torch.tensor(math.sqrt(output.shape[-1]), dtype=output.dtype, device=output.device)


def _keep_biases_exact(model: ModelChunk) -> None:
    """Routers' biases stay fp32 where the model is 16-bit: rounded ones would choose other experts."""
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module._maintain_float32_expert_bias()


def _separate_experts(model: ModelChunk) -> None:
    """Mark the experts' parameters, whose gradients are reduced over other ranks than those of dense ones.

    Megatron does so only where experts are spread over ranks. Without that, too, tensor-parallel ranks may hold whole
    experts and route tokens of their own, or data-parallel ranks parts of one: the sums would silently be wrong.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def local_rows(model: ModelChunk) -> Iterator[tuple[str, Parameter]]:
    """(name of the local parameter or buffer, table row) for the rows that this chunk holds."""
    offset = get_transformer_layer_offset(model.config, model.vp_stage)
    experts = model.arch.num_experts // model.config.expert_model_parallel_size
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    held = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for row in parameter_table(model.arch):
        layer, expert = row.layer, row.expert
        if layer is not None and not 0 <= (layer := layer - offset) < len(model.decoder.layers):
            continue
        if expert is not None and not 0 <= (expert := expert - first_expert) < experts:
            continue
        name = row.local_name(layer, expert, te=model.backend == "te")
        if row.name == EMBEDDING and not model.pre_process and model.share_embeddings_and_output_weights:
            name = OUTPUT  # the last stage's copy of tied embeddings
        if name in held:
            yield name, row


@torch.no_grad()
def load_weights(model: ModelChunk, read: Reader) -> dict[str, Tensor]:
    """Fill the local parameters and buffers from a Hugging Face checkpoint, reading only this rank's stretches.

    A value head stays as it is: no checkpoint has one.

    Returns:
        The local parameters' shards in the precision of the source, by local name, for the optimizer's masters.

    Raises:
        UserError: if the checkpoint lacks a tensor or one has another shape than config.json says.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    shapes = hf_shapes(model.arch)
    shards: dict[str, Tensor] = {}
    for name, row in local_rows(model):
        for hf_name in row.hf_names:  # stretches of a tensor that is too large would fit
            if read.shape(hf_name) != shapes[hf_name]:
                raise UserError(
                    f"model.path: {hf_name} has the shape {read.shape(hf_name)}, "
                    f"but config.json asks for {shapes[hf_name]}"
                )
        group = _shard_group(row)
        shard = load_shard(row.rule, read, row.hf_names, group.rank(), group.size())
        if row.is_buffer:
            buffers[name].copy_(shard)
            continue
        shards[name] = shard
        parameters.pop(name).copy_(shard)
    if isinstance(model, ValueModel) and model.post_process:
        shards[OUTPUT] = parameters.pop(OUTPUT).detach()
    if parameters:
        raise RuntimeError(f"no row of the parameter table fills {sorted(parameters)}")
    return shards


def _shard_group(row: Parameter) -> dist.ProcessGroup:
    """The ranks over which a row's parameter is split."""
    group: dist.ProcessGroup = (
        parallel_state.get_tensor_model_parallel_group()
        if row.expert is None
        else parallel_state.get_expert_tensor_parallel_group()
    )
    return group


class WeightSource:
    """The weights of this rank's chunks, for pushes: each is gathered to the rank that sends it and to no other."""

    def __init__(self, chunks: Sequence[ModelChunk]) -> None:
        self._held = _held_tensors(chunks)

    @torch.no_grad()
    def gather(self, row: Parameter) -> list[Tensor] | None:
        """The row's whole Hugging Face tensors on the first of the ranks that hold its shards; None on the others.

        A collective over these ranks. The tensors may be views of the model's own.
        """
        shard, group = _shard(self._held[row.name], high_precision), _shard_group(row)
        if not row.rule.split or group.size() == 1:
            return merge_shards(row.rule, [shard])
        first = group.rank() == 0
        shards = [torch.empty_like(shard) for _ in range(group.size())] if first else None
        dist.gather(shard, shards, dist.get_global_rank(group, 0), group=group)
        return merge_shards(row.rule, shards) if shards else None


def _held_tensors(chunks: Sequence[ModelChunk]) -> dict[str, Tensor]:
    """Parameters and buffers by the names of the whole model, without the last stage's copy of tied embeddings."""
    held: dict[str, Tensor] = {}
    for chunk in chunks:
        tensors = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
        for name, row in local_rows(chunk):
            if row.name != EMBEDDING or name != OUTPUT:
                held[row.name] = tensors[name]
    return held


def _shard(tensor: Tensor, value: Callable[[torch.nn.Parameter], Tensor]) -> Tensor:
    """What leaves of a local parameter; of a buffer all, in fp32."""
    return (value(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor.float()).contiguous()


@torch.no_grad()
def export_weights(
    chunks: Sequence[ModelChunk],
    value: Callable[[torch.nn.Parameter], Tensor] = high_precision,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor), one parameter at a time, on every rank that takes part.

    A collective over the tensor-, expert- and pipeline-parallel groups of the ranks with `Layout.sends_weights`: each
    of them must consume it.

    Args:
        chunks: this rank's part.
        value: what to export of a parameter, of its shape (its data; a test exports its gradient). Buffers are
            exported as they are, in fp32.
    """
    model = chunks[0]
    placement = Placement(model.arch, model.parallel)
    held = _held_tensors(chunks)
    parameter_dtype, shapes = value(next(model.parameters())).dtype, hf_shapes(model.arch)
    for row in parameter_table(model.arch):
        whole: list[Tensor] | None = None
        dtype = torch.float32 if row.is_buffer else parameter_dtype
        if row.name in held:
            shard = _shard(held[row.name], value)
            whole = merge_shards(row.rule, _gather(shard, _shard_group(row)) if row.rule.split else [shard])
        for group, owner in _owners(row, placement):
            if group.size() > 1:
                whole = _broadcast(whole, [shapes[name] for name in row.hf_names], dtype, group, owner)
        assert whole is not None
        yield from zip(row.hf_names, whole, strict=True)


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return shards


def _owners(row: Parameter, placement: Placement) -> Iterator[tuple[dist.ProcessGroup, int]]:
    """The groups over which a row's tensors are spread, in the order of their broadcasts, and who has them there."""
    pipeline, stage = parallel_state.get_pipeline_model_parallel_group(), placement.stage(row)
    if row.expert is not None and pipeline.rank() == stage:
        yield parallel_state.get_expert_model_parallel_group(), placement.expert_owner(row)
    yield pipeline, stage


def _broadcast(
    tensors: list[Tensor] | None,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    owner: int,
) -> list[Tensor]:
    """Give every rank of `group` the tensors, of these shapes, of its rank `owner`."""
    source = dist.get_global_rank(group, owner)
    received = []
    for i, shape in enumerate(shapes):
        tensor = (
            tensors[i].contiguous()
            if tensors is not None
            else torch.empty(shape, dtype=dtype, device=device.current_device())
        )
        dist.broadcast(tensor, source, group=group)
        received.append(tensor)
    return received
