#!/usr/bin/env bash
# One model through every form: Hugging Face -> Megatron at TP 3, two steps of training there, the state resharded to
# two pipeline stages, two more steps, exported to Hugging Face; then the same greedy answers from transformers, vLLM
# and Megatron. About ten minutes on two CPU cores.
#
#   examples/checkpoints/journey.sh [MODEL [FOLDER]]     defaults: models/SmolLM2-135M, runs/journey
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

model=${1:-models/SmolLM2-135M}
folder=${2:-runs/journey}
bin=.venv/bin
config=examples/laptop/addition.yaml
settings=(training.precision=fp32 fleet.dtype=float32 rollout.prompts_per_step=4 rollout.samples_per_prompt=8
    training.mini_batch=16 evaluation.data=null)
rm -rf "$folder"
mkdir -p "$folder"

step() {
    echo
    echo "\$ $*"
    "$@"
}

step $bin/dapo-megatron convert --hf "$model" --out "$folder/tp3" --tp 3 --verify
step $bin/dapo-megatron train $config --nproc 3 model.path="$folder/tp3" run.dir="$folder/first" run.steps=2 \
    parallel.tensor=3 "${settings[@]}"
step $bin/dapo-megatron inspect "$folder/first"
step $bin/dapo-megatron reshard --checkpoint "$folder/first" --out "$folder/second" --pp 2 --verify
step $bin/dapo-megatron train $config --nproc 2 model.path="$folder/tp3" run.dir="$folder/second" run.steps=4 \
    parallel.pipeline=2 "${settings[@]}"
step $bin/dapo-megatron export --checkpoint "$folder/second" --out "$folder/exported" --verify
step $bin/dapo-megatron compare-weights "$folder/second/state/step_000004" "$folder/exported"
step $bin/python tools/check_greedy.py --hf "$folder/exported" --megatron "$folder/second/state/step_000004"
