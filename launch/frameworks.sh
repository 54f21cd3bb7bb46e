#!/usr/bin/env bash
# Nightly: LLaMA-Factory, ms-swift, TRL and axolotl train by the commands of docs/launchers.md, save, and resume on other
# numbers of ranks, on CPU processes:   bash launch/frameworks.sh FOLDER [NAME ...]
# Ray Train's worker groups (the name "ray") run by tests/integration/test_controllers.py.
# Each gets an environment of its own below FOLDER, kept between calls, that sees the installed torch and DeepSpeed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh disable=SC1091
source launch/environment.sh

folder=$(realpath -m "$1")
shift
declare -A packages=([llamafactory]=llamafactory==0.9.5 [swift]=ms-swift==4.6.0 [trl]=trl==1.16.0 [axolotl]=axolotl==0.19.0)
packages[ray]="ray[train]==2.60.0"
export PIP_DISABLE_PIP_VERSION_CHECK=1
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

make_environment() {
    local python=$folder/$1/bin/python
    # shellcheck disable=SC2153 # of environment.sh
    "$PYTHON" -m venv "$folder/$1"
    printf '%s\n' "$PWD" "$(site "$PYTHON")" >"$(site "$python")/installed.pth"
    # torchvision and torchaudio would bring another torch, built for GPUs; these frameworks use them for images and sound
    printf 'torch==%s\n' "$("$PYTHON" -c 'import torch; print(torch.__version__.split("+")[0])')" >"$folder/constraints.txt"
    "$python" -m pip install -q -c "$folder/constraints.txt" "${packages[$1]}"
    "$python" -m pip uninstall -qy torchvision torchaudio
    touch "$(site "$python")/torchaudio.py" # which LLaMA-Factory imports
    # commands of packages that are only seen, such as torch's, are not beside this Python
    printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$@"\n' "$python" >"$folder/$1/bin/torchrun"
    printf '#!/bin/sh\nexec "%s" -m elastic_ckpt "$@"\n' "$python" >"$folder/$1/bin/elastic-ckpt"
    chmod +x "$folder/$1/bin/"{torchrun,elastic-ckpt}
    touch "$folder/$1/made"
}

mkdir -p "$folder"
[[ $# -gt 0 ]] || set -- "${!packages[@]}"
for name; do
    [[ -e $folder/$name/made ]] || make_environment "$name"
    command=(launch/frameworks.py "$name" "$folder")
    [[ $name != ray ]] || command=(-m pytest tests/integration/test_controllers.py -k ray)
    PATH=$folder/$name/bin:$PATH "$folder/$name/bin/python" "${command[@]}"
done
