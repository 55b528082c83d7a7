"""The server's side of a weight push: a vLLM weight-transfer engine, loaded as a vLLM plugin.

A push is: start_weight_update, update_weights (all buckets, one broadcast each), the sender compares
`weight_hashes` with its own, finish_weight_update. vLLM reloads layer by layer: a layer's tensors are
kept until it is complete, then processed and copied into the live storage.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from dapo_megatron.sync import group as transfer
from dapo_megatron.sync.buckets import TensorSpec, pack, tensor_hash

ENGINE_NAME = "dapo"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not type-checked
    """Where to join the transfer group. This server's workers have the ranks from `rank_offset` on."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    epoch: int
    timeout: float  # seconds


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of one push, in the order in which they come, and the bucket limit in bytes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives full weights in Hugging Face names, whatever the server's own layout is."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.digests: dict[str, str] = {}
        self._group: transfer.TransferGroup | None = None
        self._joined: InitInfo | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the group of `init_info.epoch`, leaving an older one."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = transfer.join_store(init_info.host, init_info.port, init_info.timeout)
        meeting = transfer.epoch_store(store, init_info.epoch)
        meeting.set(transfer.arrival_key(rank), "")
        self._joined = init_info
        self._group = transfer.TransferGroup(
            meeting,
            address=transfer.route_to(init_info.host, init_info.port),
            rank=rank,
            world_size=init_info.world_size,
            backend=init_info.backend,
            timeout=init_info.timeout,
        )

    def start_weight_update(self) -> None:
        """Puts the model into the state in which layers wait for their tensors."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # A push before this one failed halfway: what it left must not count.
                info.loaded_weights.clear()
                info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives, hashes and loads every bucket.

        Raises RuntimeError if a tensor is unknown, does not fit, or if a parameter got nothing.
        """
        if self._group is None or self._joined is None:
            raise RuntimeError("weights were pushed before a transfer group was joined")
        self.digests = {}
        if current_platform.is_cpu():
            _forget_packed_experts(self.model)
        failure: Exception | None = None
        for bucket in pack(_specs(update_info), update_info.bucket_bytes):
            # A new buffer each time: layers that are not complete yet still refer to the last one.
            buffer = transfer.byte_buffer(bucket.nbytes, self._joined.backend)
            self._group.start_broadcast(buffer, self._joined.timeout)
            self._group.wait()
            tensors = bucket.views(buffer)
            self.digests.update((name, tensor_hash(tensor)) for name, tensor in tensors)
            if failure is None:
                try:
                    self.model.load_weights(tensors)
                except Exception as error:  # go on receiving: the other servers' broadcast needs this rank
                    failure = error
        if failure is not None:
            raise RuntimeError(f"the model refused pushed weights: {failure!r}") from failure
        missing = missing_parameters(self.model, tied=self._tied())
        if missing:
            raise RuntimeError(f"the push left {len(missing)} parameters without weights, the first is {missing[0]}")

    def finish_weight_update(self) -> None:
        """Makes the received weights live."""
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if current_platform.is_cpu() and self._tied() and isinstance(head, ParallelLMHead):
            # On a CPU the output matrix is packed for oneDNN when it is loaded. A tied one is never
            # loaded itself, so its packed copy would silently keep the old embedding.
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        if current_platform.is_cpu():
            # The C library keeps what the reload freed; trainer ranks on the same machine need it.
            ctypes.CDLL(None).malloc_trim(0)

    def shutdown(self) -> None:
        """Leaves the transfer group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))


class ReceiverExtension:
    """What `/collective_rpc` can call on every worker (`--worker-extension-cls`)."""

    weight_transfer_engine: Receiver
    _weight_update_active: bool

    def weight_hashes(self) -> dict[str, str]:
        """SHA-256 of every tensor of the last push, as it arrived, by name."""
        return self.weight_transfer_engine.digests

    def abandon_weight_update(self) -> None:
        """Closes an update that its sender gave up, without making it live; the next one starts afresh."""
        self._weight_update_active = False  # vLLM would refuse another start, and its own way out is to finish


def _forget_packed_experts(model: nn.Module) -> None:
    """Make every layer of experts pack its next weights for the CPU's kernel as it packed the first.

    vLLM packs them when it sets the kernel up, and takes a layer whose kernel stands to need only a copy: plain
    weights would be copied over packed ones, or, where the shapes differ, not at all.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def missing_parameters(model: nn.Module, *, tied: bool) -> list[str]:
    """Names of parameters that a layerwise reload has not filled yet; call it before finalizing.

    vLLM itself only warns and keeps the old weights. Vocabulary padding is never sent, and a `tied`
    output matrix comes with the embedding.
    """
    missing = []
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or (tied and isinstance(layer, ParallelLMHead)):
            continue
        if info.load_numel < _numel_sent(layer):
            missing += [f"{prefix}.{name}" for name, _ in layer.named_parameters(recurse=False)]
    return missing


def _numel_sent(layer: nn.Module) -> int:
    """Elements that a full push brings for the parameters that `layer` itself holds on this rank."""
    if isinstance(layer, VocabParallelEmbedding):
        return int(layer.shard_indices.num_org_elements * layer.embedding_dim)
    return sum(parameter.numel() for _, parameter in layer.named_parameters(recurse=False))


def _specs(update: UpdateInfo) -> list[TensorSpec]:
    columns = zip(update.names, update.dtype_names, update.shapes, strict=True)
    return [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in columns]


def register() -> None:
    """Makes the engine known to vLLM; the `vllm.general_plugins` entry point. May be called again."""
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, Receiver)


# vLLM's workers import this module for ReceiverExtension; registering here makes a checkout that was
# never installed work like an installed package, which vLLM finds through its entry point.
register()
