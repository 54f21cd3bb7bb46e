#!/usr/bin/env bash
# Lint, format, types, then the tests. Arguments go to pytest: bash launch/test.sh -k planner
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
if [[ $# -gt 0 ]]; then
    "$PYTHON" -m pytest "$@"
else
    "$PYTHON" -m pytest -n 2 --ignore=tests/distributed
    "$PYTHON" -m pytest --maxfail=3 tests/distributed # its jobs have processes of their own
fi
