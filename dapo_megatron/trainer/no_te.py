"""Fixes for megatron-core where Transformer Engine is absent, with or without CUDA.

megatron-core is developed with Transformer Engine; these are the places where its fallback is broken in 0.16.
`apply()` does nothing where Transformer Engine is installed.
"""

import functools
import importlib.metadata
import importlib.util
from typing import Any

import torch


@functools.cache
def has_te() -> bool:
    """Whether megatron-core uses Transformer Engine: installed alone is not enough, it cannot always be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True


def te_version() -> str | None:
    """Version of Transformer Engine; None where it cannot be used."""
    return importlib.metadata.version("transformer-engine") if has_te() else None


def has_fused_weight_gradient() -> bool:
    """Whether apex is installed with its kernel that adds weight gradients to the fp32 buffers."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


@functools.cache  # a second call would wrap the fixes again
def apply() -> None:
    """Install the fixes. Call after `device.import_megatron()`; idempotent."""
    if has_te():
        return
    _fix_adam_step()
    _fix_moe_router()
    _fix_latent_attention()
    _fix_recompute_without_output()


def _fix_adam_step() -> None:
    """DistributedOptimizer gives all parameters one shared `step` tensor when it loads a state.

    torch's AdamW advances it once per parameter, so bias correction is wrong from the second step after a resume.
    Copying a parameter's state also writes into fp32 leaf views, and expects a `step` that the checkpoint lacks.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    @functools.wraps(DistributedOptimizer._set_main_param_and_optimizer_states)
    @torch.no_grad()
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        for key, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if key != "step":  # restored from the parameter groups
                target.copy_(tensors[key])

    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _fix_moe_router() -> None:
    """The router asks whether Transformer Engine's GEMM is None, but the name is never defined without it."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def _fix_latent_attention() -> None:
    """Latent attention takes names that it could import for Transformer Engine's classes; without it they are None."""
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = False


def _fix_recompute_without_output() -> None:
    """Selective recompute of layer norms takes fp8=False for "FP8 is on" and then looks for Transformer Engine."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__

    @functools.wraps(original)
    def init(self: Any, fp8: Any = None) -> None:
        original(self, fp8 or None)

    CheckpointWithoutOutput.__init__ = init
