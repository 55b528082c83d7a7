"""The Megatron-core policy.

Importing any module of this package imports megatron-core, adapted to this machine first: a module that met the
unadapted library would keep names that fail without CUDA.
"""

import warnings

from dapo_megatron.trainer import device, no_te, precision

# What the libraries tell their own developers, once per process and rank.
for message in (
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    "Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=message)
if not device.has_cuda():  # there are no CUDA queues whose number could be wrong
    warnings.filterwarnings(
        "ignore", message="When using (async grad allreduce|sequence parallelism) it is recommended"
    )

precision.set_environment()  # before megatron-core imports Transformer Engine
device.import_megatron()
no_te.apply()
