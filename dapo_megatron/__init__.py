"""Reinforcement learning of reasoning models with DAPO: a Megatron-core policy and a fleet of vLLM servers."""

__version__ = "0.1.0"
