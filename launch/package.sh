#!/usr/bin/env bash
# Build the wheel and the source distribution, check them, and try the wheel outside the checkout, in a fresh environment
# that sees the installed torch and DeepSpeed:   bash launch/package.sh [FOLDER]      (dist)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh
unset PYTHONPATH # it would show the checkout

dist=$(realpath -m "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$dist"/elastic_ckpt-* build # leftovers of an older build would be packed again
"$PYTHON" -m build --no-isolation --outdir "$dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$PYTHON" -m twine check --strict "$dist"/*

"$PYTHON" -m venv --without-pip "$work/fresh"
fresh=$work/fresh/bin/python
# pip first: it would take an elastic_ckpt that it sees for the one that is asked for
"$PYTHON" -m pip --python "$fresh" install -q --no-deps --no-index "$dist"/*.whl
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$fresh" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed.pth"

cp launch/smoke.py "$work"
cd "$work"
PATH="$work/fresh/bin:$PATH" "$fresh" smoke.py
ls -l "$dist"
