#!/usr/bin/env bash
# Run the tests.
#   bash launch/test.sh            what takes seconds, and a core of real jobs: 8 minutes on two cores
#   bash launch/test.sh --lint     lint, format, types, layers, documentation: one minute
#   bash launch/test.sh --all      both, and the slow tests
#   bash launch/test.sh --nightly  those marked nightly
#   bash launch/test.sh --fuzz     nightly: 200,000 mutated files
#   bash launch/test.sh --soak     nightly: an hour of random topologies
#   bash launch/test.sh --flows    nightly: two hours of random jobs at an unchanged topology
#   bash launch/test.sh --changes  nightly: an hour of random changes between a script that saves and one that loads
#   bash launch/test.sh --spoil    nightly: every cell of the distributed tests must be able to fail
#   bash launch/test.sh --mutants  nightly: 80 places of the package are changed, and the tests that reach each must fail
#   bash launch/test.sh --shuffle  --all in an order that a seed draws; ELASTIC_CKPT_TEST_SHUFFLE=SEED shows it again
#   ELASTIC_CKPT_TEST_WORKERS=1 bash launch/test.sh   one worker in place of two for tests that start jobs
#   bash launch/test.sh -k planner other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

lint() {
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    lint-imports
    shellcheck launch/*.sh launch/*.sbatch .ci/run
    if "$PYTHON" -c 'import mkdocs, material, mkdocstrings' 2>/dev/null; then
        local site
        site=$(mktemp -d)
        NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --strict -q -d "$site"
        rm -rf "$site"
    else
        echo "the documentation is not built: pip install -e '.[docs]'"
    fi
}

jobs=(tests/distributed tests/integration) # with processes of their own
run_tests() {
    "$PYTHON" -m pytest -n 2 -m "$1" --ignore="${jobs[0]}" --ignore="${jobs[1]}"
    local workers=() number=${ELASTIC_CKPT_TEST_WORKERS:-2}
    if [[ $number != 1 ]]; then # a file's checkpoints are made by one of them
        workers=(-n "$number" --dist loadfile -o timeout=1200)
    fi
    "$PYTHON" -m pytest --maxfail=3 -m "$1" "${workers[@]}" "${jobs[@]}" # together: DeepSpeed's ops are built once
}

mutants() {
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    "$PYTHON" -m tests.mutants record "$folder"
    "$PYTHON" -m tests.mutants run "$folder" --seed "${ELASTIC_CKPT_MUTANTS:-$RANDOM}"
}

case ${1:-} in
    "") run_tests "not slow and not nightly" ;;
    --lint) lint ;;
    --all) lint; run_tests "not nightly" ;;
    --shuffle) export ELASTIC_CKPT_TEST_SHUFFLE=${ELASTIC_CKPT_TEST_SHUFFLE:-$RANDOM}; run_tests "not nightly" ;;
    --nightly) "$PYTHON" -m pytest -m nightly "${jobs[@]}" ;;
    --fuzz) ELASTIC_CKPT_FUZZ=${ELASTIC_CKPT_FUZZ:-200000} "$PYTHON" -m pytest -n 2 -o timeout=0 tests/attacks/test_mutations.py ;;
    --soak) "$PYTHON" -m tests.drawn walks --minutes "${ELASTIC_CKPT_SOAK:-60}" ;;
    --flows) "$PYTHON" -m tests.drawn flows --minutes "${ELASTIC_CKPT_FLOWS:-120}" ;;
    --changes) "$PYTHON" -m tests.drawn changes --minutes "${ELASTIC_CKPT_CHANGES:-60}" ;;
    --mutants) mutants ;;
    --spoil) ELASTIC_CKPT_TEST_SPOIL=1 "$PYTHON" -m pytest "${jobs[0]}" ;;
    *) "$PYTHON" -m pytest "$@" ;;
esac
