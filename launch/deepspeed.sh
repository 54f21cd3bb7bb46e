#!/usr/bin/env bash
# A training script under DeepSpeed's launcher, with elastic loading:
#
#   RANKS=8 bash launch/deepspeed.sh train.py --my-args
#   HOSTFILE=hosts bash launch/deepspeed.sh train.py --my-args
#
#   RANKS      on each node; all accelerators where it is not set
#   HOSTFILE   several nodes, over ssh, a line each: node17 slots=8
#   PORT       that ranks meet at, 29500
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: [RANKS=8] [HOSTFILE=hosts] [PORT=29500] bash $0 script [arguments ...]" >&2
    exit 2
fi
if [[ -n ${HOSTFILE:-} && ! -f $HOSTFILE ]]; then # deepspeed would run on this node alone
    echo "$0: HOSTFILE=$HOSTFILE: there is no such file" >&2
    exit 2
fi
options=(--master_port "${PORT:-29500}")
[[ -z ${RANKS:-} ]] || options+=(--num_gpus "$RANKS")
[[ -z ${HOSTFILE:-} ]] || options+=(--hostfile "$HOSTFILE")

exec deepspeed "${options[@]}" --module elastic_ckpt.run "$@"
