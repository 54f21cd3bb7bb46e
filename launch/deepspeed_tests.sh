#!/usr/bin/env bash
# Nightly: DeepSpeed's own tests of checkpoints, without and with elastic_ckpt installed; the table goes to docs/compatibility.md.
#   bash launch/deepspeed_tests.sh FOLDER      a checkout of DeepSpeed's repository of the installed version
#   bash launch/deepspeed_tests.sh FOLDER -k latest      other arguments go to pytest
# They take an hour or two on 2 cores. pytest is installed once, below MATRIX_FOLDER (.matrix).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

folder=$(realpath -m "${MATRIX_FOLDER:-.matrix}")
tests=$(realpath "$1/tests")
# their fixtures are classes, which pytest takes until 8.3
[[ -d $folder/pytest ]] || "$PYTHON" -m pip install -q --target "$folder/pytest" pytest==8.3.5 pytest-timeout
export PYTHONPATH=$folder/pytest:$PWD:$tests OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu LOCAL_SIZE=64
export TORCH_EXTENSIONS_DIR=$folder/extensions/deepspeed-tests DS_UNITTEST_TIMEOUT=${DS_UNITTEST_TIMEOUT:-240}
rm -f "$TORCH_EXTENSIONS_DIR"/*/lock # of a run that was ended: DeepSpeed would wait for it for ever
# takes minutes, once, in which a test would count as hanging
"$PYTHON" -c 'from deepspeed.ops import op_builder as ops; [op().load(verbose=False) for op in (ops.CPUAdamBuilder, ops.FusedAdamBuilder)]'

for ELASTIC in 0 1; do
    export ELASTIC OUTCOMES=$folder/outcomes-$ELASTIC
    rm -f "$OUTCOMES"
    (cd "$tests" && "$PYTHON" -m pytest -q -p launch.deepspeed_plugin -p no:cacheprovider --timeout 600 "${@:2}" unit/checkpoint) \
        || true # many fail for want of a GPU
done
"$PYTHON" launch/deepspeed_table.py "$folder/outcomes-0" "$folder/outcomes-1" docs/compatibility.md
