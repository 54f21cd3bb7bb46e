#!/usr/bin/env bash
# A training script under torchrun that resumes from a universal checkpoint, or any other, with --universal-checkpoint:
#
#   RANKS=8 bash launch/universal_torchrun.sh train.py --my-args
#
#   RANKS      a number, or gpu (the default): as many as there are
#   MODE       auto (the default), or require: an error where there is nothing to load, or nothing but DeepSpeed's own
#              loader could load it
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: [RANKS=8] [MODE=require] bash $0 [-m] script [arguments ...]" >&2
    exit 2
fi

# Where the script's own parser has the flag (elastic_ckpt.add_arguments), it may stand behind the script as well.
exec torchrun --standalone --nproc-per-node="${RANKS:-gpu}" \
    -m elastic_ckpt.run --universal-checkpoint="${MODE:-auto}" "$@"
