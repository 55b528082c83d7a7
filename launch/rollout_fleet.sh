#!/usr/bin/env bash
# Start vLLM servers for RL on this node, and stop them all when one ends or this script is asked to end.
#
#   launch/rollout_fleet.sh CONFIG [KEY=VALUE ...]
#
# Run it on every node of the fleet. The trainer finds the servers through URLS_FILE (fleet.urls_file), which it reads
# again during the run: nodes that start later join, and those that stop leave. With Slurm:
#
#   srun --nodes=4 --ntasks-per-node=1 bash -c 'SERVER_HOST=$(hostname -i) FIRST_INDEX=$((SLURM_PROCID * 8)) \
#       launch/rollout_fleet.sh CONFIG'
#
# Where every node has its servers from the first port on, the list of nodes will do instead of a file:
# fleet.hosts=$SLURM_JOB_NODELIST fleet.servers_per_host=8.
#
# From the environment:
#   TOKEN_FILE   file with the token that opens the servers; made, readable by you alone, where it does not exist
#   URLS_FILE    file that gets a line with the URL of each healthy server; nodes may share it, and its .lock
#   SERVERS      servers on this node     (default: its GPUs / (fleet.tensor x fleet.pipeline), or 1 without any)
#   FIRST_INDEX  number of the first one in the whole fleet; must differ between nodes   (default: 0)
#   SERVER_HOST  private address of this node that the trainer reaches                   (default: fleet.host)
#   PORT         port of the first server; the next ones count up                        (default: 8000)
#   PYTHON       Python of the servers' environment       (default: .venv/bin/python, else python3)
#
# Exit codes: 0 after SIGTERM or SIGINT, 1 when a server ended by itself, 2 something to correct.
set -euo pipefail

refuse() {
    echo "launch/rollout_fleet.sh: $*" >&2
    exit 2
}

(($# > 0)) || refuse "give a configuration: launch/rollout_fleet.sh CONFIG [KEY=VALUE ...]"
[[ -f $1 ]] || refuse "the configuration $1 does not exist"
for name in TOKEN_FILE URLS_FILE; do
    [[ -n ${!name:-} ]] || refuse "$name is not set; see the head of this script"
done
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$repository/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
command -v "$PYTHON" >/dev/null || refuse "$PYTHON is not installed: run 'make setup', or name another with PYTHON"

settings=$("$PYTHON" - "$@" <<'PY'
import sys

from dapo_megatron.config.load import load_config
from dapo_megatron.errors import UserError

try:
    fleet = load_config(sys.argv[1], sys.argv[2:]).fleet
except UserError as error:
    sys.exit(f"launch/rollout_fleet.sh: {error}")
print(fleet.world_size, fleet.host)
PY
) || exit 2
read -r workers configured_host <<<"$settings"
: "${SERVER_HOST:=$configured_host}"
: "${PORT:=8000}"
: "${FIRST_INDEX:=0}"

# The node's GPUs, by the names that CUDA_VISIBLE_DEVICES knows them by; none on a CPU.
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -r -a gpus <<<"$CUDA_VISIBLE_DEVICES"
else
    mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
fi
: "${SERVERS:=$((${#gpus[@]} > 0 ? ${#gpus[@]} / workers : 1))}"
for name in SERVERS PORT; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name} must be a positive number"
done
[[ $FIRST_INDEX =~ ^[0-9]+$ ]] || refuse "FIRST_INDEX=$FIRST_INDEX must be a number"
((${#gpus[@]} == 0 || SERVERS * workers <= ${#gpus[@]})) ||
    refuse "$SERVERS servers of fleet.tensor x fleet.pipeline = $workers GPUs need more than the ${#gpus[@]} GPUs of this node"

if [[ ! -s $TOKEN_FILE ]]; then
    (umask 077 && "$PYTHON" -c 'import secrets; print(secrets.token_hex(32))' >"$TOKEN_FILE")
fi

urls=$(mktemp) # those of this node
pids=()

# Nodes may share the file: it is changed under a lock, and replaced as a whole, so that nobody reads half of it.
publish() {
    (
        flock 9
        [[ ! -e $URLS_FILE ]] || cat "$URLS_FILE" >"$URLS_FILE.new"
        cat "$urls" >>"$URLS_FILE.new"
        mv -f "$URLS_FILE.new" "$URLS_FILE"
    ) 9>>"$URLS_FILE.lock"
}

# shellcheck disable=SC2329 # called by the trap
stop_all() {
    trap - EXIT
    trap '' TERM INT
    if [[ -s $urls && -e $URLS_FILE ]]; then
        (
            flock 9
            grep -vxFf "$urls" "$URLS_FILE" >"$URLS_FILE.new" || true
            mv -f "$URLS_FILE.new" "$URLS_FILE"
        ) 9>>"$URLS_FILE.lock"
    fi
    ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null || true
    wait
    rm -f "$urls"
}
trap stop_all EXIT
trap 'exit 0' TERM INT

for ((i = 0; i < SERVERS; i++)); do
    if ((${#gpus[@]} > 0)); then
        slice=("${gpus[@]:i*workers:workers}")
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${slice[*]}")
        export CUDA_VISIBLE_DEVICES
    fi
    # setpriv: a server ends with this script even when the script is killed outright.
    setpriv --pdeathsig TERM "$PYTHON" -m dapo_megatron.cli serve "$@" --index $((FIRST_INDEX + i)) \
        --host "$SERVER_HOST" --port $((PORT + i)) --token-file "$TOKEN_FILE" >>"$urls" &
    pids+=($!)
done

while (($(wc -l <"$urls") < SERVERS)); do
    (($(jobs -pr | wc -l) == SERVERS)) || exit 1 # one has ended and said why
    sleep 0.5 &
    wait $! # unlike sleep itself, it is interrupted by a signal
done
publish
echo "$SERVERS servers are ready, their addresses are in $URLS_FILE:"
cat "$urls"
wait -n || true
exit 1
