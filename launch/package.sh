#!/usr/bin/env bash
# Build the wheel and the source distribution, check them, and try the wheel outside the checkout, in fresh environments:
# one that sees all that is installed, one with just what the wheel requires, which is not DeepSpeed, and one without torch
# either:   bash launch/package.sh [FOLDER]      (dist)
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

cp launch/smoke.py launch/link_packages.py "$work"
cd "$work"

# An environment with the wheel alone. pip: it would take an elastic_ckpt that it sees for the one that is asked for.
make_environment() {
    "$PYTHON" -m venv --without-pip "$work/$1"
    "$PYTHON" -m pip --python "$work/$1/bin/python" install -q --no-deps --no-index "$dist"/*.whl
}
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
try() { DS_ACCELERATOR=cpu PATH="$work/$1/bin:$PATH" "$work/$1/bin/python" smoke.py "$1" "$work/checkpoint"; }

make_environment all
site "$PYTHON" >"$(site "$work/all/bin/python")/installed.pth"
try all
make_environment light
"$PYTHON" link_packages.py "$(site "$work/light/bin/python")" elastic_ckpt
"$PYTHON" -m pip --python "$work/light/bin/python" check
try light
make_environment bare
"$PYTHON" link_packages.py "$(site "$work/bare/bin/python")" elastic_ckpt torch
try bare
ls -l "$dist"
