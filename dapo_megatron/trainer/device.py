"""Everything that makes megatron-core run on a machine without CUDA, in one place.

`import_megatron()` must run before anything else imports `megatron.core`. Where CUDA is present it changes nothing.
Without it, each megatron module listed in `PATCHED_MODULES` gets a stand-in for the name `torch` in its own
namespace: the stand-in hands every attribute through, except that "cuda" as a device means the CPU and that the
few `torch.cuda` functions megatron calls do something sensible. Torch itself stays untouched, because libraries
loaded later (transformers, for one) build wrong tables when its factories are replaced.
"""

import contextlib
import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Modules of megatron-core that name a CUDA device, and the call that needs the replacement.
PATCHED_MODULES: dict[str, str] = {
    "megatron.core.parallel_state": "destroy and rebuild of groups: synchronize",
    "megatron.core.tensor_parallel.layers": "sequence-parallel gather buffers: current_device",
    "megatron.core.tensor_parallel.mappings": "gather and reduce-scatter buffers: current_device",
    "megatron.core.tensor_parallel.random": "RNG tracker: get_rng_state, manual_seed",
    "megatron.core.tensor_parallel.utils": "split of activations: current_device",
    "megatron.core.distributed.param_and_grad_buffer": "parameter and gradient buffers: current_device",
    "megatron.core.distributed.finalize_model_grads": "gradient reduction: current_device",
    "megatron.core.optimizer.clip_grads": 'norm and overflow buffers: device="cuda"',
    "megatron.core.optimizer.distrib_optimizer": "optimizer state at load: current_device",
    "megatron.core.optimizer.optimizer": 'loss scale and found-inf flags: device="cuda"',
    "megatron.core.pipeline_parallel.schedules": 'token counter: device="cuda"',
    "megatron.core.pipeline_parallel.p2p_communication": "receive buffers: current_device, synchronize",
    "megatron.core.transformer.attention": "sequence parallel attention buffers: current_device",
    "megatron.core.utils": "NVTX ranges: nvtx.range_push",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": 'checkpoint consensus flags: device="cuda"',
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "before writing: synchronize",
    "megatron.core.dist_checkpointing.strategies.fully_parallel": "after exchange of shards: synchronize",
    "megatron.core.dist_checkpointing.strategies.async_utils": "agreement of ranks on a finished save: current_device",
    "megatron.core.dist_checkpointing.exchange_utils": 'exchange of loaded shards: device="cuda"',
}

# Functions that compare Tensor.type() with the names of CUDA tensor types.
TYPE_CHECKS: tuple[tuple[str, str], ...] = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer._build_model_and_main_param_groups"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
)

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


def has_cuda() -> bool:
    """Whether this machine trains on CUDA devices."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """The device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of the trainer's groups."""
    return "nccl" if has_cuda() else "gloo"


def set_device(local_rank: int, threads: int) -> None:
    """Bind this process to its GPU, or limit it to its share of the cores."""
    if has_cuda():
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(threads)


def model_config_overrides() -> dict[str, Any]:
    """TransformerConfig fields that differ where there is no CUDA: kernels that exist only there are off."""
    if has_cuda():
        return {}
    return {
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }


class _Stream:
    """Stands for a CUDA stream or event where all work is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept what torch.cuda.Stream accepts."""

    def wait_stream(self, other: "_Stream") -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class _StandIn(types.ModuleType):
    """A module that hands every attribute through to `wrapped`, except those given."""

    def __init__(self, wrapped: types.ModuleType, **replacements: Any) -> None:
        super().__init__(wrapped.__name__)
        self.__dict__["_wrapped"] = wrapped
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory for which device="cuda" is the CPU and pinned memory is ordinary memory."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _cuda_stand_in() -> types.ModuleType:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    random = types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    return _StandIn(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),  # layers, buffers, p2p: where to allocate
        device_count=lambda: 1,  # checkpoint writer: rank modulo devices
        set_device=nothing,  # checkpoint writer
        synchronize=nothing,  # p2p and checkpoints, before buffers are read
        empty_cache=nothing,  # optimizer state offload
        Stream=_Stream,  # gradient communication
        Event=_Stream,
        current_stream=_Stream,
        default_stream=_Stream,
        stream=lambda stream=None: contextlib.nullcontext(stream),  # gradient communication
        get_rng_state=get_rng_state,  # RNG tracker
        set_rng_state=set_rng_state,
        manual_seed=lambda seed: torch.default_generator.manual_seed(int(seed)),  # RNG tracker: not all of torch
        random=random,
        nvtx=types.SimpleNamespace(range_push=nothing, range_pop=nothing),  # profiling marks
    )


def _torch_stand_in() -> types.ModuleType:
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _StandIn(torch, cuda=_cuda_stand_in(), **factories)


def _expect_cpu_types(module: types.ModuleType, qualified: str) -> None:
    """Make a function's literal 'torch.cuda.FloatTensor' and the like read 'torch.FloatTensor'."""
    function: Any = module
    for part in qualified.split("."):
        function = getattr(function, part)
    function = getattr(function, "__func__", function)

    def convert(constant: Any) -> Any:
        if isinstance(constant, str):
            return constant.replace("torch.cuda.", "torch.") if constant.endswith("Tensor") else constant
        return tuple(map(convert, constant)) if isinstance(constant, tuple) else constant

    code = function.__code__
    constants = tuple(map(convert, code.co_consts))
    if constants == code.co_consts:
        raise RuntimeError(f"{module.__name__}.{qualified} compares no CUDA tensor types: megatron-core has changed")
    function.__code__ = code.replace(co_consts=constants)


@contextlib.contextmanager
def _without_compile() -> Iterator[None]:
    """Decorators that run while megatron-core is imported leave functions as they are.

    `megatron.core.jit.jit_fuser` is torch.compile; on a CPU its C++ build costs more than the fusion gains.
    """
    original = torch.compile
    torch.compile = lambda model=None, *args, **kwargs: model if model is not None else (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def import_megatron() -> None:
    """Import megatron-core and, without CUDA, adapt it. Idempotent."""
    if has_cuda():
        importlib.import_module("megatron.core")
        return
    with _without_compile(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        modules = {name: importlib.import_module(name) for name in PATCHED_MODULES}
    random = modules["megatron.core.tensor_parallel.random"]
    if isinstance(random.torch, _StandIn):
        return
    stand_in = _torch_stand_in()
    for module in modules.values():
        module.torch = stand_in  # type: ignore[attr-defined]
    for name, qualified in TYPE_CHECKS:
        _expect_cpu_types(modules[name], qualified)
    # The tracker writes the state through a private CUDA call queue that never runs here.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]
    # Pipeline stages with tied embeddings move the copied weight to the GPU by method (language_module).
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
