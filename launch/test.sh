#!/usr/bin/env bash
# Lint, format, types, layers, documentation, then the tests.
#   bash launch/test.sh            without those marked slow: 12 minutes on two cores
#   bash launch/test.sh --all      these, too: 40
#   bash launch/test.sh --nightly  those marked nightly
#   bash launch/test.sh --fuzz     nightly: 200,000 mutated files
#   bash launch/test.sh --soak     nightly: an hour of random topologies
#   bash launch/test.sh --flows    nightly: two hours of random jobs at an unchanged topology
#   bash launch/test.sh -k planner other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
lint-imports
shellcheck launch/*.sh launch/*.sbatch .ci/run
if "$PYTHON" -c 'import mkdocs, material, mkdocstrings' 2>/dev/null; then
    site=$(mktemp -d)
    NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --strict -q -d "$site"
    rm -rf "$site"
else
    echo "the documentation is not built: pip install -e '.[docs]'"
fi
if [[ ${1:-} == --fuzz ]]; then
    ELASTIC_CKPT_FUZZ=${ELASTIC_CKPT_FUZZ:-200000} "$PYTHON" -m pytest -n 2 -o timeout=0 tests/attacks/test_mutations.py
elif [[ ${1:-} == --nightly ]]; then
    "$PYTHON" -m pytest -m nightly tests/distributed tests/integration
elif [[ ${1:-} == --soak ]]; then
    "$PYTHON" -m tests.soak --minutes "${ELASTIC_CKPT_SOAK:-60}" --seed "$RANDOM"
elif [[ ${1:-} == --flows ]]; then
    "$PYTHON" -m tests.flows --minutes "${ELASTIC_CKPT_FLOWS:-120}"
elif [[ $# -gt 0 && $1 != --all ]]; then
    "$PYTHON" -m pytest "$@"
else
    which=(-m "not slow and not nightly")
    [[ ${1:-} == --all ]] && which=(-m "not nightly")
    "$PYTHON" -m pytest -n 2 "${which[@]}" --ignore=tests/distributed --ignore=tests/integration
    # jobs with processes of their own; together, so that DeepSpeed's ops are built once
    "$PYTHON" -m pytest --maxfail=3 "${which[@]}" tests/distributed tests/integration
fi
