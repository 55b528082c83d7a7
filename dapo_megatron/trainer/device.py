"""Everything that makes megatron-core run on a machine without CUDA, in one place.

`import_megatron()` must run before anything else imports `megatron.core`. Where CUDA is present it changes nothing.
Without it, each megatron module listed in `PATCHED_MODULES` gets a stand-in for the name `torch` in its own
namespace: the stand-in hands every attribute through, except that "cuda" as a device means the CPU and that the
few `torch.cuda` functions megatron calls do something sensible. Torch itself stays untouched, because libraries
loaded later (transformers, for one) build wrong tables when its factories are replaced.
"""

import contextlib
import ctypes
import functools
import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# Modules of megatron-core that use CUDA, and the use that needs the replacement.
PATCHED_MODULES: dict[str, str] = {
    "megatron.core.tensor_parallel.random": "RNG tracker and recompute: get_rng_state, manual_seed",
    "megatron.core.distributed.param_and_grad_buffer": "parameter and gradient buffers: current_device",
    "megatron.core.optimizer.clip_grads": 'norm of the gradients: zeros(device="cuda")',
    "megatron.core.optimizer.grad_scaler": 'loss scale of fp16: tensor(device="cuda")',
    "megatron.core.optimizer.optimizer": 'constant loss scale: tensor(device="cuda")',
    "megatron.core.pipeline_parallel.schedules": 'token counter: zeros(device="cuda")',
    "megatron.core.pipeline_parallel.p2p_communication": "receive buffers: current_device, synchronize",
    "megatron.core.tensor_parallel.mappings": "sequence parallelism: current_device of what is gathered",
    "megatron.core.tensor_parallel.layers": "sequence parallelism: current_device of a gradient's shard",
    "megatron.core.transformer.moe.router": "a router's weight and bias: current_device",
    "megatron.core.transformer.moe.token_dispatcher": "counts of tokens leave the GPU on a stream of their own",
    "megatron.core.utils": 'norm of a list of tensors: tensor(device="cuda")',
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": "flag of a failed write: current_device",
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "before writing: synchronize",
}

# Functions that compare Tensor.type() with the names of CUDA tensor types.
TYPE_CHECKS: tuple[tuple[str, str], ...] = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer._build_model_and_main_param_groups"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
)

# Functions that call Tensor.cuda(): the last stage's copy of tied embeddings.
MOVES: tuple[tuple[str, str], ...] = (
    (
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
)

_FACTORIES = ("tensor", "zeros")


def has_cuda() -> bool:
    """Whether this machine trains on CUDA devices."""
    return torch.cuda.is_available()


def current_device() -> torch.device:
    """The device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of the trainer's groups."""
    return "nccl" if has_cuda() else "gloo"


def gpu_memory() -> list[int]:
    """Memory of each GPU of this machine, in bytes; empty where ranks compute on CPUs."""
    if not has_cuda():
        return []
    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def set_device(local_rank: int, threads: int) -> None:
    """Bind this process to its GPU, or limit it to its share of the cores."""
    if has_cuda():
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(threads)


def release_memory() -> None:
    """Give freed memory back to the system.

    On a CPU activations are freed to the C library, which keeps them: the servers on the same machine could not use
    them while this process waits, and pieces of changing size would let the process grow step by step.
    """
    if not has_cuda():
        ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> int | None:
    """Bytes of this rank's GPU that nobody holds, once this process keeps none in reserve; None on a CPU."""
    if not has_cuda():
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def allocated_memory() -> int | None:
    """Bytes of this rank's GPU that this process's tensors take; None on a CPU."""
    return int(torch.cuda.memory_allocated()) if has_cuda() else None


def peak_growth() -> int:
    """Bytes of this rank's GPU that were held at most, beyond those that are held now; 0 on a CPU."""
    return torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved() if has_cuda() else 0


def model_config_overrides() -> dict[str, Any]:
    """TransformerConfig fields that differ where there is no CUDA: where parameters are allocated."""
    return {} if has_cuda() else {"use_cpu_initialization": True}


class _StandIn(types.ModuleType):
    """A module that hands every attribute through to `wrapped`, except those given."""

    def __init__(self, wrapped: types.ModuleType, **replacements: Any) -> None:
        super().__init__(wrapped.__name__)
        self.__dict__["_wrapped"] = wrapped
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)


class _NoStream:
    """What stands for a CUDA stream and its events where everything is done when a call returns."""

    def record_event(self) -> "_NoStream":
        """The event."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


_NO_STREAM = _NoStream()


def _counts_on_cpu(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens as collectives take them; megatron converts only what comes from a GPU."""
    return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
    """`all_gather` of tensors of different length along the first dimension, which gloo refuses."""
    longest = max(map(len, outputs))
    if all(len(output) == longest for output in outputs):
        return dist.all_gather(outputs, tensor, **options)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(parts, padded, **options)
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part[: len(output)])
    return None


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], *, group: dist.ProcessGroup) -> None:
    """`reduce_scatter` of a list of tensors of different length along the first dimension, which gloo refuses."""
    whole = torch.cat(inputs)
    dist.all_reduce(whole, group=group)
    output.copy_(whole.split([len(part) for part in inputs])[group.rank()])


def _load_loss_scale(scaler: Any, state: dict[str, Any]) -> None:
    """Restore fp16's loss scale; megatron moves it to the GPU."""
    scaler._scale, scaler._growth_tracker = state["scale"], state["growth_tracker"]
    scaler._hysteresis_tracker = state["hysteresis_tracker"]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory for which device="cuda" is the CPU."""

    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return create


def _torch_stand_in() -> types.ModuleType:
    cuda = _StandIn(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),  # gradient buffers, p2p, checkpoints: where to allocate
        synchronize=lambda: None,  # p2p and checkpoints, before buffers are read
        get_rng_state=torch.get_rng_state,  # RNG tracker
        manual_seed=torch.default_generator.manual_seed,  # RNG tracker
        Stream=lambda: _NO_STREAM,  # token dispatcher
        current_stream=lambda: _NO_STREAM,  # token dispatcher
        random=types.SimpleNamespace(get_rng_state=lambda device: torch.get_rng_state()),  # recompute
    )
    # Experts split over ranks: each rank has another number of tokens for them.
    distributed = _StandIn(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    return _StandIn(
        torch, cuda=cuda, distributed=distributed, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    )


def _function(module: str, qualified: str) -> types.FunctionType:
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    function: types.FunctionType = getattr(found, "__func__", found)
    return function


def _expect_cpu_types(function: types.FunctionType) -> None:
    """Make a function's literal 'torch.cuda.FloatTensor' and the like read 'torch.FloatTensor'."""

    def convert(constant: Any) -> Any:
        if isinstance(constant, tuple):
            return tuple(map(convert, constant))
        is_type = isinstance(constant, str) and constant.startswith("torch.cuda.")
        return constant.replace("torch.cuda.", "torch.") if is_type else constant

    _replace_code(function, co_consts=convert(function.__code__.co_consts))


def _stay_on_cpu(function: types.FunctionType) -> None:
    """Make a function's `.cuda()` read `.cpu()`, which leaves a tensor of this machine as it is."""
    names = function.__code__.co_names
    _replace_code(function, co_names=tuple("cpu" if name == "cuda" else name for name in names))


def _replace_code(function: types.FunctionType, **fields: Any) -> None:
    code = function.__code__.replace(**fields)
    if code == function.__code__:
        raise RuntimeError(f"{function.__qualname__} no longer names CUDA: megatron-core has changed")
    function.__code__ = code


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
    for place in TYPE_CHECKS:
        _expect_cpu_types(_function(*place))
    for place in MOVES:
        _stay_on_cpu(_function(*place))
    modules["megatron.core.transformer.moe.token_dispatcher"].maybe_move_tensor_to_cpu = _counts_on_cpu  # type: ignore[attr-defined]
    modules["megatron.core.optimizer.grad_scaler"].DynamicGradScaler.load_state_dict = _load_loss_scale
    # It does not hand on where its positions are to be allocated.
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    latent.RotaryEmbedding = functools.partial(latent.RotaryEmbedding, use_cpu_initialization=True)
    # The tracker restores the state through a queue of CUDA calls that never runs here.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]
