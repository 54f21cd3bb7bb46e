#!/usr/bin/env bash
# Measure what README and documentation show, check it in, and write it there. Close everything else: it takes an hour.
#   bash launch/benchmarks.sh FOLDER              all of it; FOLDER keeps checkpoints and single measurements
#   bash launch/benchmarks.sh FOLDER run gaps     these alone; the others stay as they are
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

out=${1:-benchmark_results}
names=("${@:2}")
[[ ${#names[@]} -gt 0 ]] || names=(cold run export collectives gaps metadata scale pretrained sparse buckets)
for name in "${names[@]}"; do
    arguments=(--out "$out")
    case $name in
    run) arguments+=(--params 270M --stages 3 --dp 2:4 --repeats 5) ;;
    cold) arguments=("$out" --extensions "$out/extensions" --repeats 1) ;;
    sparse) arguments=("$out" --extensions "$out/extensions") ;;
    buckets)
        if [[ $(id -u) -ne 0 ]] || ! command -v nginx >/dev/null || ! command -v tc >/dev/null; then
            echo "left out: buckets, which needs root, nginx and tc"
            continue
        fi
        ;;
    esac
    "$PYTHON" -m "benchmarks.$name" "${arguments[@]}"
done
"$PYTHON" -m benchmarks.report --out "$out"
