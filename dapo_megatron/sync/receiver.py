"""The server's side of a weight push: a vLLM weight-transfer engine, loaded as a vLLM plugin.

A push is: start_weight_update, update_weights (all buckets, one broadcast each), the trainer compares the hashes of
what was `received` with its own, finish_weight_update. vLLM reloads layer by layer: a layer's tensors are
kept until it is complete, then processed and copied into the live storage.

Workers raise nothing: where one of several does, vLLM leaves the others' replies unread and takes them for those to the
next request. Each worker remembers what went wrong, and the trainer asks for it.
"""

import ctypes
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from dapo_megatron.sync.buckets import has_nan
from dapo_megatron.sync.inbox import Inbox, whole_tensor

ENGINE_NAME = "dapo"
logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is not type-checked
    """Where to join the transfer groups, and what travels on them: `groups` and `buckets` as `wire.encode` gives them.

    This server is number `server` of `servers`.
    """

    host: str
    port: int
    server: int
    servers: int
    groups: list[Any]
    buckets: list[Any]
    backend: str
    way: str
    epoch: int
    timeout: float  # seconds


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One push. `check_nan`: parts of tensors that this worker does not get must not reach its parameters."""

    check_nan: bool


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives this worker's parts of the weights, and hands vLLM tensors of Hugging Face's names and shapes.

    Attributes:
        inbox: of the incarnation that it has joined.
        error: the first thing that went wrong since the last push began, or since it joined; empty: nothing.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inbox: Inbox | None = None
        self.error = ""
        self._nan_watch = NanWatch()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the groups of `init_info.epoch`, leaving older ones."""
        self.error = ""
        with self._remembering():
            self.shutdown()
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.inbox = Inbox(worker, **vars(init_info))

    def start_weight_update(self) -> None:
        """Puts the model into the state in which layers wait for their tensors."""
        self.error = ""
        with self._remembering():
            self._nan_watch.end()
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():
                    # A push before this one failed halfway: what it left must not count.
                    info.loaded_weights.clear()
                    info.load_numel = 0
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives, hashes and loads every bucket, each while the next is on its way.

        It is an `error` if a tensor is unknown, does not fit, or if a parameter got nothing or what was not sent.
        """
        with self._remembering():
            if self.inbox is None:
                raise RuntimeError("weights were pushed before a transfer group was joined")
            if current_platform.is_cpu():
                _forget_packed_experts(self.model)
            if update_info.check_nan:
                self._nan_watch.begin(self.model)
            for stretches in self.inbox.receive():
                if not self.error:  # else go on receiving: the other servers' broadcast needs this rank
                    with self._remembering("the model refused pushed weights: "):
                        self.model.load_weights(
                            (s.name, whole_tensor(s, view, watched=self._nan_watch.active)) for s, view in stretches
                        )
            self._check_complete(self.inbox)

    def _check_complete(self, inbox: Inbox) -> None:
        """Raises RuntimeError if a parameter got nothing or what was not sent."""
        # On a pipeline stage some layers are there for nothing, but a worker has a part of every tensor otherwise.
        pushed = inbox.names if self.parallel_config.pipeline_parallel_size > 1 else None
        missing = missing_parameters(self.model, pushed, tied=self._tied())
        if missing:
            raise RuntimeError(
                f"the push left {len(missing)} parameters without weights, the first is {missing[0]}: was the server "
                "started by `dapo-megatron serve` with the run's configuration?"
            )
        self._nan_watch.check()

    def finish_weight_update(self) -> None:
        """Makes the received weights live."""
        with self._remembering():
            finalize_layerwise_reload(self.model, self.model_config)
            self._nan_watch.end()
            self._nan_watch.check()  # layers with padding are complete only now
            if current_platform.is_cpu():
                self._finish_on_cpu()

    def _finish_on_cpu(self) -> None:
        head = getattr(self.model, "lm_head", None)
        if self._tied() and isinstance(head, ParallelLMHead):
            # On a CPU the output matrix is packed for oneDNN when it is loaded. A tied one is never
            # loaded itself, so its packed copy would silently keep the old embedding.
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        # The C library keeps what the reload freed; trainer ranks on the same machine need it.
        ctypes.CDLL(None).malloc_trim(0)

    @contextmanager
    def _remembering(self, prefix: str = "") -> Iterator[None]:
        """Keeps an exception's text as `error` instead of raising it, unless there is one already."""
        try:
            yield
        except Exception as failure:
            logger.exception("a weight push failed")
            self.error = self.error or f"{prefix}{failure!r}"

    def shutdown(self) -> None:
        """Leaves the transfer groups."""
        if self.inbox is not None:
            self.inbox.close()
            self.inbox = None

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))


class ReceiverExtension:
    """What `/collective_rpc` can call on every worker (`--worker-extension-cls`)."""

    weight_transfer_engine: Receiver
    _weight_update_active: bool

    def received(self) -> dict[str, Any]:
        """Of the last push: `hashes` of all stretches, as they arrived, `seconds` by phase, and the `error` if any."""
        engine = self.weight_transfer_engine
        if engine.inbox is None:
            return {"hashes": [], "seconds": {}, "error": engine.error or "no transfer group was joined"}
        return {"hashes": engine.inbox.hashes, "seconds": engine.inbox.seconds, "error": engine.error}

    def failure(self) -> str:
        """What went wrong since the last push began, or since the worker joined; empty: nothing."""
        return self.weight_transfer_engine.error

    def abandon_weight_update(self) -> None:
        """Closes an update that its sender gave up, without making it live; the next one starts afresh."""
        self._weight_update_active = False  # vLLM would refuse another start, and its own way out is to finish


class NanWatch:
    """Finds parameters that a layer is given and that were not sent: vLLM splits a tensor otherwise than planned.

    It looks at a layer when all of its tensors are in place and before they are packed for a kernel.
    """

    def __init__(self) -> None:
        self._wrapped: list[Any] = []
        self._found: list[str] = []

    @property
    def active(self) -> bool:
        """Whether a push is watched."""
        return bool(self._wrapped)

    def begin(self, model: nn.Module) -> None:
        """Watches all layers of `model` that are processed after loading."""
        self._found = []
        names = {layer: name for name, layer in model.named_modules()}
        for method in {
            id(m): m for layer in names if isinstance(m := _quant_method(layer), QuantizeMethodBase)
        }.values():
            method.process_weights_after_loading = partial(self._process, method.process_weights_after_loading, names)
            self._wrapped.append(method)

    def end(self) -> None:
        """Leaves the layers as they were."""
        for method in self._wrapped:
            del method.process_weights_after_loading
        self._wrapped = []

    def check(self) -> None:
        """Raises RuntimeError naming the first parameter that was found."""
        if self._found:
            raise RuntimeError(
                f"{self._found[0]} was loaded with numbers that were not sent to this worker, or that are none: "
                "vLLM splits it otherwise than planned"
            )

    def _process(self, process: Callable[[nn.Module], None], names: dict[nn.Module, str], layer: nn.Module) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.is_floating_point() and has_nan(parameter):
                self._found.append(f"{names.get(layer, type(layer).__name__)}.{name}")
        process(layer)


def _quant_method(layer: nn.Module) -> Any:
    return getattr(layer, "quant_method", None)


def _forget_packed_experts(model: nn.Module) -> None:
    """Make every layer of experts pack its next weights for the CPU's kernel as it packed the first.

    vLLM packs them when it sets the kernel up, and takes a layer whose kernel stands to need only a copy: plain
    weights would be copied over packed ones, or, where the shapes differ, not at all.
    """
    for layer in model.modules():
        method = _quant_method(layer)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def missing_parameters(model: nn.Module, pushed: Collection[str] | None, *, tied: bool) -> list[str]:
    """Names of parameters that a layerwise reload has not filled yet; call it before finalizing.

    vLLM itself only warns and keeps the old weights. Vocabulary padding is never sent, and a `tied`
    output matrix comes with the embedding. Some models have embedding, final norm and output on every pipeline stage:
    outside of layers, a stage needs what is among the tensors `pushed` to it.
    """
    missing = []
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or (tied and isinstance(layer, ParallelLMHead)):
            continue
        if pushed is not None and ".layers." not in prefix and f"{prefix}.weight" not in pushed:
            continue
        if info.load_numel < _numel_sent(layer):
            missing += [f"{prefix}.{name}" for name, _ in layer.named_parameters(recurse=False)]
    return missing


def _numel_sent(layer: nn.Module) -> int:
    """Elements that a full push brings for the parameters that `layer` itself holds on this rank."""
    if isinstance(layer, VocabParallelEmbedding):
        return int(layer.shard_indices.num_org_elements * layer.embedding_dim)
    return sum(parameter.numel() for _, parameter in layer.named_parameters(recurse=False))


def register() -> None:
    """Makes the engine known to vLLM; the `vllm.general_plugins` entry point. May be called again."""
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, Receiver)


# vLLM's workers import this module for ReceiverExtension; registering here makes a checkout that was
# never installed work like an installed package, which vLLM finds through its entry point.
register()
