#!/usr/bin/env bash
# Nightly: save and resume jobs of 32 ranks on this machine, exactly: ZeRO on other numbers of ranks, nodes with disks of
# their own, tensor and pipeline parallelism. Five minutes and 6 GiB of memory on two cores.
#   bash launch/large.sh
#   bash launch/large.sh -k nodes   other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

"$PYTHON" -m pytest -m nightly -o timeout=1800 "$@" tests/distributed/test_large.py
