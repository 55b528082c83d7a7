"""DAPO's own numbers (arXiv 2503.14476): clipping, overlong shaping."""

from typing import Literal

from pydantic import Field

from dapo_megatron.config.base import Section


class ClipConfig(Section):
    """Asymmetric clipping of the probability ratio (the paper's "clip-higher", eq. 10)."""

    low: float = Field(0.2, gt=0, le=1, description="eps_low: the ratio is clipped below at 1 - low.")
    high: float = Field(0.28, gt=0, description="eps_high: the ratio is clipped above at 1 + high.")
    dual: float | None = Field(
        10.0,
        gt=1,
        description="Dual clip c: for a negative advantage the loss is at most -c x A. null switches it off.",
    )


class OverlongConfig(Section):
    """Soft overlong punishment (eq. 13)."""

    cache_tokens: int = Field(
        0,
        ge=0,
        description="L_cache, in tokens: the penalty grows linearly over the last cache_tokens before "
        "rollout.max_tokens. 0 switches the punishment off.",
    )
    factor: float = Field(1.0, ge=0, description="The largest penalty, reached at rollout.max_tokens.")


class AlgorithmConfig(Section):
    """The DAPO objective."""

    loss: Literal["ppo_clip", "gspo"] = Field(
        "ppo_clip",
        description="Clip each token's probability ratio (eq. 8), or that of the whole response (GSPO, arXiv "
        "2507.18071; customary with clip low 3e-4, high 4e-4 and sequence_mean).",
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm"] = Field(
        "token_mean",
        description="Mean over all tokens of the mini-batch (eq. 12), mean over responses of their token means (GRPO), "
        "or sum of tokens / (responses x rollout.max_tokens) (Dr.GRPO).",
    )
    clip: ClipConfig = Field(default_factory=ClipConfig, description="Ratio clipping.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="Soft overlong punishment.")
