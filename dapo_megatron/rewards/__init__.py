"""Judging answers. Importing this package loads no torch."""

from dapo_megatron.rewards.registry import Grade, grade

__all__ = ["Grade", "grade"]
