#!/usr/bin/env bash
# Load checkpoints on the supported versions of DeepSpeed, torch and Python (tests/distributed/test_versions.py):
#   bash launch/matrix.sh               three versions of DeepSpeed
#   bash launch/matrix.sh --all         nightly: eight versions, other versions of torch and Python, and more features
#                                       (test_versions_features.py); writes docs/compatibility.md
#   bash launch/matrix.sh --releases    ZeRO, pipelines, experts and universal checkpoints on every release of DeepSpeed
#                                       since 0.14.5, or again on those named; writes docs/compatibility.md
# Versions are installed once, below MATRIX_FOLDER (.matrix). An environment needs pythonX.Y on PATH, or is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

folder=$(realpath -m "${MATRIX_FOLDER:-.matrix}")
results=$folder/${1:-}
overlays=(0.14.5 0.16.9 0.18.9)
environments=()
basics=tests/distributed/test_versions.py
features=tests/distributed/test_versions_features.py
cells=("$basics")
if [[ ${1:-} == --all ]]; then
    export ELASTIC_CKPT_TEST_VERSIONS=1
    cells+=("$features")
    overlays=(0.14.5 0.15.4 0.16.9 0.17.6 0.18.9 0.19.0 0.19.7 0.19.8)
    # Python, torch, DeepSpeed, and Transformers and Accelerate of that time
    environments=("3.10 2.4.1 0.14.5 4.44.2 0.34.2" "3.12 2.7.1 0.16.9 4.51.3 1.6.0" "3.13 2.15.0 0.19.8 5.23.0 1.15.0")
elif [[ ${1:-} == --releases ]]; then
    export ELASTIC_CKPT_TEST_VERSIONS=1
    cells=("$basics::test_resumes_bit_exactly[ZeRO-1 to ZeRO-3, bf16]")
    cells+=("$basics::test_resumes_bit_exactly[ZeRO-3 to ZeRO-2]")
    cells+=("$basics::test_experts_resume_bit_exactly_at_other_degrees")
    cells+=("$features::test_changes_its_degree[PipelineModule]")
    cells+=("$features::test_universal_checkpoints_resume_bit_exactly[universal, ZeRO-1 to 3]")
    overlays=("${@:2}")
    if [[ $# == 1 ]]; then
        rm -rf "$results"
        versions=$("$PYTHON" -m pip index versions deepspeed | sed -n 's/^Available versions: //p' | tr -d ,)
        [[ " $versions " == *" 0.14.5 "* ]] || { echo "pip lists no DeepSpeed 0.14.5" >&2; exit 1; }
        read -ra overlays <<<"${versions%% 0.14.4*}"
    fi
fi
mkdir -p "$results"
[[ ${1:-} == --releases ]] || rm -f "$results"/*.xml
failed=0

# Runs the cells with the Python $2 and DeepSpeed of the folder $3, if any; $1 names the results.
run_cells() {
    echo "== $1"
    rm -f "$folder/extensions/$1"/*/lock # of a run that was ended: DeepSpeed would wait for it for ever
    mkdir -p "$folder/extensions/$1"
    ELASTIC_CKPT_TEST_EXTENSIONS=$folder/extensions/$1 PYTHONPATH=${3:+$3:}$PWD "$2" -m pytest -q --timeout 300 \
        --junitxml "$results/$1.xml" "${cells[@]}" || failed=1
}

for deepspeed in "${overlays[@]}"; do
    overlay=$folder/deepspeed-$deepspeed
    if [[ ! -d $overlay/deepspeed ]]; then
        # setup.py of DeepSpeed looks at the torch that is there
        DS_BUILD_OPS=0 "$PYTHON" -m pip install -q --no-deps --no-build-isolation --target "$overlay" "deepspeed==$deepspeed"
    fi
    run_cells "deepspeed-$deepspeed" "$PYTHON" "$overlay"
done

for versions in "${environments[@]}"; do
    read -r python torch deepspeed transformers accelerate <<<"$versions"
    environment=$folder/python-$python-torch-$torch-deepspeed-$deepspeed
    if [[ ! -e $environment/installed ]]; then
        command -v "python$python" >/dev/null || { echo "skipped: there is no python$python"; continue; }
        "python$python" -m venv "$environment"
        "$environment/bin/python" -m pip install -q setuptools wheel "torch==$torch"
        DS_BUILD_OPS=0 "$environment/bin/python" -m pip install -q --no-build-isolation "deepspeed==$deepspeed"
        "$environment/bin/python" -m pip install -q "transformers==$transformers" "accelerate==$accelerate"
        "$environment/bin/python" -m pip install -q -e '.[matrix]'
        touch "$environment/installed"
    fi
    PATH=$environment/bin:$PATH run_cells "$(basename "$environment")" "$environment/bin/python"
done

if [[ ${1:-} == --all ]]; then
    "$PYTHON" launch/matrix_table.py "$results" docs/compatibility.md --all
elif [[ ${1:-} == --releases && -e $results/deepspeed-0.14.5.xml ]]; then # not a few alone
    "$PYTHON" launch/matrix_table.py "$results" docs/compatibility.md --releases
fi
exit $failed
