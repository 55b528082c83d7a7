"""Model families: one file each, with its dimensions; the table of parameters that they share, and rules of layouts.

Importing this package loads no torch; `dapo_megatron.models.table` and `.sharding` do.
"""

SUPPORTED_ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
