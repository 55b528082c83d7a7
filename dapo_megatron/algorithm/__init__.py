"""The DAPO objective (arXiv 2503.14476) as pure functions: nothing distributed, nothing of Megatron.

`overlong` and `group_filter` need no torch, because the rollout controller calls them. Importing this package loads
nothing else.
"""
