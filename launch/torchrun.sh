#!/usr/bin/env bash
# A training script under torchrun, with elastic loading. On one node:
#
#   RANKS=8 bash launch/torchrun.sh train.py --my-args
#
# On one to four nodes, the first of which is node17 (started on each of them, with the same words):
#
#   RANKS=8 NODES=1:4 HEAD_NODE=node17 JOB=llama bash launch/torchrun.sh train.py --my-args
#
# Where a node is lost, those that are left start the script anew on fewer ranks, and it resumes from its last checkpoint.
# A node that comes later has all of them start anew on more.
# HEAD_NODE itself must not be lost: it keeps the list of who takes part.
#
#   RANKS      on each node: a number, or gpu (the default): as many as there are
#   NODES      how many: 2, or 1:4 for what there is between one and four; HEAD_NODE: host or host:port of the first
#   RESTARTS   how often the script may be started anew, 3; RDZV_CONF: what torchrun's --rdzv-conf takes
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: [RANKS=8] [NODES=1:4 HEAD_NODE=host JOB=name] bash $0 [-m] script [arguments ...]" >&2
    exit 2
fi
nodes=${NODES:-1}
if [[ $nodes != 1 && -z ${HEAD_NODE:-} ]]; then
    echo "$0: NODES=$nodes: which is the first of them? HEAD_NODE=host" >&2
    exit 2
fi

# With torch 2.13, a node that joins a running job waits for an address that the first rank has written once, for others.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
exec torchrun --nnodes="$nodes" --nproc-per-node="${RANKS:-gpu}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-id="${JOB:-elastic}" --rdzv-endpoint="${HEAD_NODE:-localhost:0}" \
    --rdzv-conf="${RDZV_CONF:-last_call_timeout=30}" \
    -m elastic_ckpt.run "$@"
