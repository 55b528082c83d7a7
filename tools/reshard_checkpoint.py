"""A Megatron checkpoint, or a run's newest state, in another layout (`dapo-megatron reshard`).

torchrun --nproc-per-node 8 tools/reshard_checkpoint.py --help
"""

import sys

from dapo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["reshard", *sys.argv[1:]]))
