"""The formats of quantised weights, and what vLLM makes of layers. No torch: the command line lists them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One way of storing weights.

    Attributes:
        preset: modelopt's configuration, a name in `modelopt.torch.quantization`.
        algorithm: what the exported files call it.
        input_multiple: vLLM takes only layers whose input width is a multiple of this.
        fused_multiple: vLLM fuses layers only if their output widths are multiples of this.
        experts: whether vLLM has a kernel for experts stored in this way.
        static_inputs: whether the scale of the inputs is calibrated and stored; else it is taken at run time.
    """

    preset: str
    algorithm: str
    input_multiple: int = 1
    fused_multiple: int = 1
    experts: bool = True
    static_inputs: bool = True


FORMATS = {
    "fp8": Format("FP8_DEFAULT_CFG", "FP8"),
    "fp8_block": Format(
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "FP8_PB_WO", 128, fused_multiple=128, experts=False, static_inputs=False
    ),
    "fp8_channel": Format(
        "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN", experts=False, static_inputs=False
    ),
    "nvfp4": Format("NVFP4_DEFAULT_CFG", "NVFP4", input_multiple=16),
}

E4M3_MAX = 448.0
FP8_BLOCK = 128  # rows and columns of a matrix that share a scale

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What vLLM makes of several layers of one parent: they must be quantised together."""

ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of the modules beside `experts` that choose among them."""


def fused_group(path: str) -> tuple[str, tuple[str, ...]]:
    """Name of the layer that vLLM makes of this one and the paths it is made of: `path` alone where none is fused."""
    parent, _, name = path.rpartition(".")
    for fused, parts in FUSED.items():
        if name in parts:
            return f"{parent}.{fused}", tuple(f"{parent}.{part}" for part in parts)
    return path, (path,)
