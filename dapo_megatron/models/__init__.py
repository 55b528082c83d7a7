"""Model families: one file each, with its Megatron dimensions and its parameter table.

Importing this package loads no torch; `dapo_megatron.models.registry` does.
"""

SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("LlamaForCausalLM", "Qwen2ForCausalLM")
