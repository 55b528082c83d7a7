"""A checkpoint quantised with nvidia-modelopt in the form that vLLM loads (`dapo-megatron quantize`).

python tools/quantize_checkpoint.py --help
"""

import sys

from dapo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main(["quantize", *sys.argv[1:]]))
