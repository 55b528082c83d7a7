#!/usr/bin/env bash
# Start the trainer under torchrun: on this machine, or on this node of many. Run it once on every node.
#
#   launch/train.sh CONFIG [KEY=VALUE ...]
#
# From the environment:
#   NPROC          trainer ranks on this node                    (default: its GPUs, or 1 without any)
#   NNODES         nodes of the trainer                          (default: 1)
#   RDZV_ENDPOINT  HOST:PORT of one of the nodes, the same on all of them; needed with NNODES > 1
#   RDZV_ID        name of this start of the run, the same on all nodes   (default: run.dir)
#   NODE_RANK      optional: 0 on the node of RDZV_ENDPOINT, other numbers elsewhere; for nodes whose host name is not
#                  the one in RDZV_ENDPOINT
#   LOCAL_ADDR     this node's private address, where its host name does not lead other nodes to it
#   PYTHON         Python of the trainer                         (default: .venv/bin/python, else python3)
#
# Every variable that is set below can be set by you instead. Exit codes are those of `dapo-megatron train`: 0 done,
# 2 something to correct, 130 Ctrl-C.
set -euo pipefail

refuse() {
    echo "launch/train.sh: $*" >&2
    exit 2
}

# ---- what can be wrong is found before any process starts ----
(($# > 0)) || refuse "give a configuration: launch/train.sh CONFIG [KEY=VALUE ...]"
[[ -f $1 ]] || refuse "the configuration $1 does not exist"
for override in "${@:2}"; do
    [[ $override == *=* ]] || refuse "'$override' is not KEY=VALUE"
done

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$repository/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
command -v "$PYTHON" >/dev/null || refuse "$PYTHON is not installed: run 'make setup', or name another with PYTHON"

# Compute capability of the GPUs, such as 9.0; empty without any.
capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true)
capability=${capabilities%%$'\n'*}
gpus=$(grep -c . <<<"$capabilities" || true)
: "${NNODES:=1}"
: "${NPROC:=$((gpus > 0 ? gpus : 1))}"
for name in NNODES NPROC; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name} must be a positive number"
done
((gpus == 0 || NPROC <= gpus)) || refuse "NPROC=$NPROC is more than the $gpus GPUs of this node"
if ((NNODES > 1)); then
    [[ -n ${RDZV_ENDPOINT:-} ]] || refuse "NNODES=$NNODES needs RDZV_ENDPOINT=HOST:PORT, the same on all nodes"
    [[ $RDZV_ENDPOINT =~ ^[^:]+:[0-9]+$ ]] || refuse "RDZV_ENDPOINT=$RDZV_ENDPOINT must be HOST:PORT"
fi

# The settings that depend on the run; a mistake in the configuration is told here, once, in its own words.
settings=$("$PYTHON" - "$@" <<'PY'
import sys

from dapo_megatron.config.load import load_config
from dapo_megatron.errors import UserError

try:
    config = load_config(sys.argv[1], sys.argv[2:])
except UserError as error:
    sys.exit(f"launch/train.sh: {error}")
fp8 = config.training.fp8.recipe if config.training.precision == "fp8" else "none"
print(config.parallel.tensor * config.parallel.context, config.training.threads or 0, fp8, config.run.dir)
PY
) || exit 2
read -r model_parallel threads fp8 run_dir <<<"$settings"

# ---- CPU ----
# torchrun would give every rank one thread. Here: as configured, or an equal share of the cores.
cores=$(nproc)
share=$((threads > 0 ? threads : cores / NPROC))
: "${OMP_NUM_THREADS:=$((share > 0 ? share : 1))}"
# Threads that wait by spinning take the cores from servers and from other ranks.
: "${OMP_WAIT_POLICY:=PASSIVE}"
export OMP_NUM_THREADS OMP_WAIT_POLICY

# ---- GPU ----
if [[ -n $capability ]]; then
    # Before Blackwell, kernels of one stream start in the order of their launch only when there is one hardware queue.
    # Tensor and context parallelism launch a transfer first and the product that hides it second: with more queues the
    # product may take all multiprocessors, and the transfer waits for it.
    if ((${capability%%.*} < 10 && model_parallel > 1)); then
        export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    fi
    # Packed micro-batches differ in size: without segments that grow, freed blocks are too small for the next one, and
    # tens of GB are reserved that nothing can use. The servers do not inherit it.
    export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
    # The last collectives of each rank are remembered, and written down when one times out: which rank was missing.
    export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
    export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
    # NCCL is silent by default, even about a link that it cannot use.
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    # Transformer Engine rounds the scales of blocks to powers of two; vLLM's fp8_per_block does not. With fp32 scales
    # both quantise a weight to the same numbers. Blackwell computes powers of two only.
    if [[ $fp8 == blockwise ]] && ((${capability%%.*} < 10)); then
        export NVTE_FP8_BLOCK_SCALING_FP32_SCALES="${NVTE_FP8_BLOCK_SCALING_FP32_SCALES:-1}"
    fi
    # Not set: NCCL_CUMEM_ENABLE, NCCL_NVLS_ENABLE, NCCL_IB_*. NCCL's own choices are right on most fabrics; a cluster
    # that needs others sets them in its own environment.
fi

# ---- torchrun, through the launcher that keeps the ranks' exit codes ----
arguments=("--nnodes=$NNODES" "--nproc-per-node=$NPROC")
if ((NNODES == 1)); then
    arguments+=(--standalone)
else
    # c10d: nodes may start in any order, and no node has to know its rank. --max-restarts stays 0: a failed run is
    # started again as a whole and resumes from its last saved state.
    arguments+=(--rdzv-backend=c10d "--rdzv-endpoint=$RDZV_ENDPOINT" "--rdzv-id=${RDZV_ID:-$run_dir}")
    # Nodes of a queue do not start in the same minute.
    configuration=join_timeout=${RDZV_TIMEOUT:-1800}
    if [[ -n ${NODE_RANK:-} ]]; then
        configuration+=,is_host=$([[ $NODE_RANK == 0 ]] && echo true || echo false)
    fi
    arguments+=("--rdzv-conf=$configuration")
    [[ -z ${LOCAL_ADDR:-} ]] || arguments+=("--local-addr=$LOCAL_ADDR")
fi
exec "$PYTHON" -m dapo_megatron.launcher "${arguments[@]}" -m dapo_megatron.train "$@"
