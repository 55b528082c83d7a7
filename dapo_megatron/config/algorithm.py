"""The objective: DAPO's own numbers (arXiv 2503.14476) and those of its relatives."""

from operator import attrgetter
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from dapo_megatron.config.base import Section, as_yaml


class ClipWarmupConfig(Section):
    """Where the clip range starts, and how it moves to `clip.low` and `clip.high`."""

    delay: int = Field(0, ge=0, description="Rollout steps with the start values.")
    steps: int = Field(ge=1, description="Rollout steps over which they then go linearly to the targets.")
    low: float = Field(gt=0, le=1, description="eps_low at the start.")
    high: float = Field(gt=0, allow_inf_nan=False, description="eps_high at the start.")


class ClipConfig(Section):
    """Asymmetric clipping of the probability ratio (the paper's "clip-higher", eq. 10)."""

    low: float = Field(0.2, gt=0, le=1, description="eps_low: the ratio is clipped below at 1 - low.")
    high: float = Field(
        0.28, gt=0, allow_inf_nan=False, description="eps_high: the ratio is clipped above at 1 + high."
    )
    dual: float | None = Field(
        10.0,
        gt=1,
        description="Dual clip c: for a negative advantage the loss is at most -c x A. null switches it off.",
    )
    by_sign: bool = Field(
        False,
        description="Mirror the interval for a negative advantage: [1 - high, 1 + low]. Only its lower end can act "
        "there, so that `low` is then without effect.",
    )
    warmup: ClipWarmupConfig | None = Field(
        None, description="Start with another clip range and move to `low` and `high`. null: they hold from the start."
    )


class OverlongConfig(Section):
    """What an answer's length does to its reward (the soft overlong punishment, eq. 13) and to its loss."""

    cache_tokens: int = Field(
        0,
        ge=0,
        description="L_cache, in tokens: the penalty grows linearly over the last cache_tokens before "
        "rollout.max_tokens, or over the first ones past it (`shift`). 0 switches the punishment off; `auto` is a "
        "fifth of rollout.max_tokens, as in the paper.",
    )
    factor: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="The largest penalty, reached at the end of the cache_tokens."
    )
    shift: Literal["before_max", "past_max"] = Field(
        "before_max",
        description="`before_max`: the penalty grows before rollout.max_tokens (eq. 13). `past_max`: it grows past it, "
        "and answers may have rollout.max_tokens + cache_tokens tokens.",
    )
    filter: bool = Field(
        False,
        description="Leave answers that the engine cut off (finish_reason `length`) out of the loss. Their rewards "
        "still count in their groups.",
    )
    brevity: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="A right answer of n tokens gains brevity x (1 - n / rollout.max_tokens).",
    )

    @model_validator(mode="after")
    def _shift_has_a_cache(self) -> "OverlongConfig":
        if self.shift == "past_max" and self.cache_tokens == 0:
            raise ValueError(
                "shift=past_max needs cache_tokens > 0 (it is 0): they are the tokens past rollout.max_tokens over "
                "which the penalty grows"
            )
        return self


class CorrectionConfig(Section):
    """Rollout correction: w = pi_old / pi_rollout, the trainer's probability over the engine's, as a weight of losses.

    The metrics `rollout_weight`, `rollout_truncated` and `rollout_masked` measure w in every mode.
    """

    mode: Literal["none", "tis", "mis"] = Field(
        "none",
        description="none: w is only measured; tis: losses times w, truncated to [floor, cap]; mis: losses times w, "
        "which counts as 0 outside [low, high]. The denominator of the aggregation stays.",
    )
    level: Literal["token", "sequence", "sequence_mean"] = Field(
        "token",
        description="w of the token, the product over its response, or their geometric mean.",
    )
    cap: float = Field(2.0, ge=1, allow_inf_nan=False, description="C of tis: larger w count as C.")
    floor: float | None = Field(None, gt=0, le=1, description="Smaller w count as this with tis. null: no lower bound.")
    low: float = Field(0.5, ge=0, le=1, description="mis keeps w from here, bound included.")
    high: float = Field(2.0, ge=1, allow_inf_nan=False, description="mis keeps w up to here, bound included.")
    max_token_staleness: int | None = Field(
        None,
        ge=0,
        description="Tokens whose weights are older than this many versions leave the loss, in every mode: neither the "
        "sum nor the count has them. null: all stay.",
    )


class AdvantageConfig(Section):
    """What a response's reward is compared with (eq. 9)."""

    estimator: Literal["group_norm", "group_mean", "leave_one_out", "min_max", "reinforce_pp", "gae"] = Field(
        "group_norm",
        description="`group_norm`: reward minus the group's mean, over its standard deviation + 1e-6 (eq. 9). "
        "`group_mean`: not divided (Dr.GRPO). `leave_one_out`: reward minus the mean of the others (RLOO). `min_max`: "
        "reward minus the group's mean, over its max - min. `reinforce_pp`: reward whitened over the whole rollout "
        "batch (REINFORCE++). `gae`: generalised advantage estimates of a critic, which is trained beside the policy "
        "(PPO; the section `critic`).",
    )
    std: Literal["sample", "population"] | None = Field(
        None,
        description="group_norm only: variance with the divisor G - 1 (`sample`) or G (`population`). null: `sample`, "
        "as the official recipe.",
    )
    over: Literal["tokens", "responses"] | None = Field(
        None,
        description="reinforce_pp only: a reward counts in mean and variance once per token of its response, or once. "
        "null: `tokens`.",
    )
    gamma: float | None = Field(None, gt=0, le=1, description="gae only: discount per token. null: 1.")
    lam: float | None = Field(
        None,
        ge=0,
        le=1,
        description="gae only: lambda, from the critic's word alone (0) to the return alone (1). null: 1.",
    )
    whiten: bool | None = Field(
        None, description="gae only: advantages to mean 0 and variance 1 over the tokens of the batch. null: false."
    )

    @model_validator(mode="after")
    def _options_are_read(self) -> "AdvantageConfig":
        readers = {"std": "group_norm", "over": "reinforce_pp", "gamma": "gae", "lam": "gae", "whiten": "gae"}
        for key, reader in readers.items():
            value = getattr(self, key)
            if value is not None and self.estimator != reader:
                raise ValueError(
                    f"{key} ({as_yaml(value)}) is read by the estimator {reader} only, not by {self.estimator}: "
                    f"leave {key} out or set it to null"
                )
        return self


class KLConfig(Section):
    """Divergence from a frozen reference policy (the section `reference`). DAPO has none."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    coefficient: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Weight of the divergence. 0: there is no reference policy."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimate from a token's d = log pi - log ref: k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d, at most "
        "10. In the loss, the gradient of k1 is 0 on average, that of k2 is the gradient of KL(pi || ref).",
    )
    place: Literal["loss", "reward"] = Field(
        "loss",
        alias="in",
        description="`loss`: added to each token's loss. `reward`: taken from the reward, estimated with the policy at "
        "the start of the step; per token with the estimator gae, summed over the response otherwise.",
    )

    @model_validator(mode="after")
    def _estimate_has_a_gradient(self) -> "KLConfig":
        if self.coefficient and self.place == "loss" and self.estimator == "k1":
            raise ValueError("estimator (k1) must be k2 or k3 with in=loss: the gradient of k1 is 0 on average")
        return self


class DPOConfig(Section):
    """Direct preference optimisation (arXiv 2305.18290), where `loss` is `dpo`."""

    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="How strongly the policy is tied to the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that are assumed to be labelled the wrong way round."
    )


class AlgorithmConfig(Section):
    """The objective. Everything at its default is DAPO without the overlong punishment."""

    preset: str | None = Field(
        None,
        description="Values to start from, those of a file in dapo_megatron/config/presets (docs/algorithm.md lists "
        "them); keys given beside it win. `algorithm: NAME` is short for `algorithm: {preset: NAME}`.",
    )
    loss: Literal["ppo_clip", "gspo", "cispo", "dpo"] = Field(
        "ppo_clip",
        description="Clip each token's probability ratio (eq. 8), or that of the whole response (GSPO, arXiv "
        "2507.18071; customary with clip low 3e-4, high 4e-4 and sequence_mean), or weight each token's log-prob by "
        "its clipped ratio, so that no token loses its gradient (CISPO, arXiv 2506.13585; clip.low 1 leaves it "
        "without a lower bound, clip.dual must be null). `dpo`: offline, from pairs of a better and a worse answer.",
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm", "sequence_sum"] = Field(
        "token_mean",
        description="Mean over all tokens of the mini-batch (eq. 12), mean over responses of their token means (GRPO), "
        "sum of tokens / (responses x rollout.max_tokens) (Dr.GRPO), or mean over responses of their token sums.",
    )
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="Advantages of responses.")
    clip: ClipConfig = Field(default_factory=ClipConfig, description="Ratio clipping.")
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Entropy bonus: this times the policy's entropy, in nats and averaged over tokens as `aggregation` "
        "says, is subtracted from the loss.",
    )
    kl: KLConfig = Field(default_factory=KLConfig, description="Divergence from a reference policy.")
    dpo: DPOConfig = Field(default_factory=DPOConfig, description="Preference optimisation, where loss is dpo.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="Rewards for length.")
    old_log_probs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="pi_old of the ratio. recompute: by the trainer at the start of the step, so that the first update "
        "has a ratio of 1; rollout: as the engine reported it, which saves a forward pass.",
    )
    rollout_correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Weights where engine and trainer differ."
    )

    @model_validator(mode="after")
    def _correction_has_two_log_probs(self) -> "AlgorithmConfig":
        if self.old_log_probs == "rollout" and self.rollout_correction.mode != "none":
            raise ValueError(
                f"rollout_correction.mode ({self.rollout_correction.mode}) must be none with "
                "old_log_probs: rollout: pi_old is then pi_rollout and every weight 1; use recompute"
            )
        return self

    @property
    def has_reference(self) -> bool:
        """Whether there is a frozen reference policy."""
        return self.kl.coefficient > 0 or self.loss == "dpo"

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage.estimator == "gae"

    @model_validator(mode="after")
    def _dpo_stands_alone(self) -> "AlgorithmConfig":
        if self.loss != "dpo":
            if self.dpo != DPOConfig():
                raise ValueError(f"dpo is read with loss=dpo only, not with loss={self.loss}: leave the section out")
            return self
        defaults = AlgorithmConfig().model_dump(include={"overlong", "advantage"})
        needed = {
            "aggregation": "sequence_sum",
            "kl.coefficient": 0.0,
            "old_log_probs": "recompute",
            "rollout_correction.mode": "none",
            **{f"{section}.{key}": value for section, keys in defaults.items() for key, value in keys.items()},
        }
        for key, only in needed.items():
            if (value := attrgetter(key)(self)) != only:
                raise ValueError(
                    f"{key} ({as_yaml(value)}) must be {as_yaml(only)} with loss=dpo, which learns from the log-probs "
                    "of pairs alone"
                )
        return self

    @model_validator(mode="after")
    def _clip_fits_the_loss(self) -> "AlgorithmConfig":
        clip = self.clip
        if self.loss == "cispo":
            if clip.dual is not None:
                raise ValueError(f"clip.dual ({clip.dual:g}) must be null with loss=cispo, which has no dual clip")
            if clip.by_sign:
                raise ValueError("clip.by_sign (true) must be false with loss=cispo, which clips both signs alike")
            return self
        for name, part in (("clip", clip), ("clip.warmup", clip.warmup)):
            if part is not None and part.high < part.low:
                raise ValueError(
                    f"{name}.high ({part.high:g}) must be at least {name}.low ({part.low:g}); only loss=cispo allows "
                    "less"
                )
        return self
