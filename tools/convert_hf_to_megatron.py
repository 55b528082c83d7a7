"""A Hugging Face folder as a Megatron checkpoint in any layout (`dapo-megatron convert`).

torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py --help
"""

import sys

from dapo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
