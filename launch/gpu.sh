#!/usr/bin/env bash
# Loads into a GPU, in some minutes: what comes back at other degrees, stages and precisions, and how fast.
#   bash launch/gpu.sh [FOLDER] [OPTION ...]      FOLDER (gpu_results) gets gpu.json and logs, docs/benchmarks.md the table
# On a machine with a GPU, and torch and DeepSpeed for it (ELASTIC_CKPT_PYTHON names the Python that has them: python3).
# bitsandbytes and a CUDA compiler are used if they are there. Without a GPU it says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "${ELASTIC_CKPT_PYTHON:-python3}" launch/gpu.py "$@"
