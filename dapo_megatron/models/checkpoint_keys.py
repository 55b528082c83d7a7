"""Where a parameter lies in Megatron's distributed checkpoints: the key and place of its shards. No torch.

megatron-core stacks layers (and experts) that are alike into one tensor per parameter, under the names of Transformer
Engine's layers: `decoder.layers.mlp.experts.experts.linear_fc1.weight` is [layers, experts, 2 ffn, hidden]. Layers
that are not alike have a key each.
"""

import re
from dataclasses import dataclass

from dapo_megatron.models.architecture import Architecture
from dapo_megatron.models.parameters import Parameter
from dapo_megatron.models.rules import Shape


@dataclass(frozen=True)
class StoredParameter:
    """A parameter in a checkpoint.

    Attributes:
        key: of the stored tensor.
        index: the parameter's place along the stacked dimensions in front of its own: layer, expert, both or none.
        stack: the sizes of these dimensions.
    """

    key: str
    index: Shape
    stack: Shape

    @property
    def extra_states(self) -> list[str]:
        """Keys of the extra states, empty without FP8, that megatron-core's and Transformer Engine's modules keep.

        Those of the module that holds the parameter; with an attention's output projection also the core attention's.
        megatron-core leaves out the output layer's.
        """
        module = self.key.rpartition(".")[0]
        if not re.search(r"(^|\.)(linear_\w+|eh_proj|\w*norm)$", module):
            return []
        modules = [module]
        if module.endswith("self_attention.linear_proj"):
            modules.append(module.replace("linear_proj", "core_attention"))
        index, stack = (".".join(map(str, numbers)) for numbers in (self.index or (0,), self.stack or (1,)))
        return [f"{module}._extra_state/shard_{index}_{stack}" for module in modules]


def stored_parameter(row: Parameter, arch: Architecture) -> StoredParameter:
    """Where `row` lies in a checkpoint of `arch`."""
    index: Shape = ()
    stack: Shape = ()
    name = row.te_template or row.template
    if row.layer is not None and arch.uniform_layers:
        name = name.replace("layers.{layer}.", "layers.")
        index, stack = (row.layer,), (arch.num_layers,)
    if row.expert is not None:
        name = re.sub(r"mlp\.experts\.(\w+)\.weight\{expert\}$", r"mlp.experts.experts.\1.weight", name)
        index, stack = (*index, row.expert), (*stack, arch.num_experts)
    return StoredParameter(name.format(layer=row.layer), index, stack)
