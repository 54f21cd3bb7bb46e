#!/usr/bin/env bash
# Train a small GPT with ZeRO-3 at DP=2; resume it midway with ZeRO-1 at DP=3; compare the losses of the two runs.
# On CPU with two cores, in a few minutes. Everything it writes is in demo_output/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
# shellcheck source=launch/environment.sh disable=SC1091
EXTRAS=plots source launch/environment.sh
echo "environment: $((SECONDS - started)) s"

if ! command -v "${CXX:-c++}" >/dev/null; then
    echo "DeepSpeed compiles its CPU communication when it starts: install a C++ compiler, such as g++" >&2
    exit 1
fi

output=demo_output
save_at=60
steps=120
rm -rf "$output"
mkdir -p "$output"

# Private: a job that is killed while it compiles leaves a lock behind, and the next one would wait for it forever.
TORCH_EXTENSIONS_DIR=$(mktemp -d)
export TORCH_EXTENSIONS_DIR
trap 'rm -rf "$TORCH_EXTENSIONS_DIR"' EXIT

# The CPU even where there is a GPU. LOCAL_SIZE=1 keeps DeepSpeed off its shared-memory all-reduce: gloo does it all.
export DS_ACCELERATOR=cpu LOCAL_SIZE=1 OMP_NUM_THREADS=1
export PYTHONWARNINGS=ignore::FutureWarning TORCH_CPP_LOG_LEVEL=ERROR

# launch RANKS ARGUMENTS...: torchrun, with a time limit, without two lines that DeepSpeed prints on every rank.
launch() {
    printf '\n$ torchrun --nproc_per_node %s\n' "$*"
    timeout --foreground --kill-after=60 900 \
        "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$@" |
        sed -u -e '/built successfully/d' -e '/before it has started/d'
}

started_training=$SECONDS
echo "DeepSpeed first compiles its CPU communication, which takes about half a minute ..."
launch 2 launch/demo_train.py --deepspeed_config configs/zero3.json --steps "$steps" \
    --save-at "$save_at" --save-dir "$output/checkpoints" --losses "$output/uninterrupted.csv"

launch 3 -m elastic_ckpt.run launch/demo_train.py --deepspeed_config configs/zero1.json --steps "$steps" \
    --resume-from "$output/checkpoints" --losses "$output/resumed.csv"
echo
echo "both jobs: $((SECONDS - started_training)) s"

"$PYTHON" launch/demo_plot.py \
    --uninterrupted "$output/uninterrupted.csv" "ZeRO-3, DP=2" \
    --resumed "$output/resumed.csv" "ZeRO-1, DP=3" \
    --png "$output/losses.png" --tolerance 1e-3
echo "whole demo: $((SECONDS - started)) s"
