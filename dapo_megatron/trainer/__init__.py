"""The Megatron-core policy.

Importing any module of this package imports megatron-core, adapted to this machine first: a module that met the
unadapted library would keep names that fail without CUDA.
"""

from dapo_megatron.trainer import device, no_te

device.import_megatron()
no_te.apply()
