"""Judging answers. Importing this package loads no torch."""

from dapo_megatron.rewards.function import Answer, BadRewardError, RewardFunction, judge
from dapo_megatron.rewards.registry import Grade, Reason, grade

__all__ = ["Answer", "BadRewardError", "Grade", "Reason", "RewardFunction", "grade", "judge"]
