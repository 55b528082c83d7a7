"""A Megatron checkpoint, or a run's newest state, as a Hugging Face folder (`dapo-megatron export`).

torchrun --nproc-per-node 8 tools/export_megatron_to_hf.py --help
"""

import sys

from dapo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
