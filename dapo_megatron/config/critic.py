"""The critic of PPO, and the frozen reference policy of a KL term or of DPO."""

from typing import Literal

from pydantic import Field

from dapo_megatron.config.base import Section
from dapo_megatron.config.training import OptimizerConfig, ParallelConfig


def _critic_optimizer() -> OptimizerConfig:
    return OptimizerConfig(lr=1e-5)


class CriticConfig(Section):
    """The critic, which `algorithm.advantage.estimator: gae` (PPO) trains beside the policy, in its layout."""

    path: str | None = Field(
        None, description="Hugging Face folder to start from, with a value head of zeros. null: model.path."
    )
    value_clip: float | None = Field(
        0.2,
        gt=0,
        allow_inf_nan=False,
        description="A value may move this far from that at the start of the step before its loss stops shrinking "
        "(as in the clipped policy loss). null: no limit.",
    )
    optimizer: OptimizerConfig = Field(default_factory=_critic_optimizer, description="The critic's own AdamW.")


class ReferenceConfig(Section):
    """The frozen reference policy, where `algorithm.kl.coefficient` is not 0 or `algorithm.loss` is dpo."""

    path: str | None = Field(None, description="Hugging Face folder. null: model.path, the policy at the start.")
    parallel: ParallelConfig | None = Field(
        None, description="Its own layout, on the ranks of the policy. null: the policy's."
    )
    precision: Literal["bf16", "fp16", "fp32"] | None = Field(
        None, description="Of its parameters and arithmetic. null: training.precision, and bf16 for fp8."
    )
    offload: bool = Field(True, description="Keep its weights in host memory while it is idle, where there is a GPU.")
