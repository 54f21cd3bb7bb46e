#!/usr/bin/env bash
# A training script under DeepSpeed's launcher that resumes from a universal checkpoint, or any other, with
# --universal-checkpoint:
#
#   RANKS=8 bash launch/universal_deepspeed.sh train.py --my-args
#
#   RANKS      all accelerators where it is not set
#   PORT       that ranks meet at, 29500
#   MODE       auto (the default), or require: an error where there is nothing to load, or nothing but DeepSpeed's own
#              loader could load it
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: [RANKS=8] [PORT=29500] [MODE=require] bash $0 script [arguments ...]" >&2
    exit 2
fi
options=(--master_port "${PORT:-29500}")
[[ -z ${RANKS:-} ]] || options+=(--num_gpus "$RANKS")

# Where the script's own parser has the flag (elastic_ckpt.add_arguments), it may stand behind the script as well.
exec deepspeed "${options[@]}" --module elastic_ckpt.run --universal-checkpoint="${MODE:-auto}" "$@"
