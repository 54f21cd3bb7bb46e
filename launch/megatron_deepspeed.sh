#!/usr/bin/env bash
# Nightly: the training codebases that are built on DeepSpeed, on a CPU; the table goes to docs/megatron.md.
#   bash launch/megatron_deepspeed.sh FOLDER             all of them
#   bash launch/megatron_deepspeed.sh FOLDER gpt-neox    models whose names contain one of the words
# FOLDER has the checkouts Megatron-DeepSpeed (4efb479d), gpt-neox (ea7aefd8) and bigscience (8387ae17 of bigscience-workshop/Megatron-DeepSpeed),
# which are copied and edited as below. Python 3.9 to 3.11; each load takes a minute on 2 cores. MATRIX_FOLDER (.matrix) keeps everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkouts=$(realpath "$1")
folder=$(realpath -m "${MATRIX_FOLDER:-.matrix}")/codebases
PYTHON=$folder/environment/bin/python
mkdir -p "$folder"
if [[ ! -e $folder/environment/installed ]]; then
    python3 -m venv "$folder/environment"
    "$PYTHON" -m pip install -q torch==2.6.0 numpy==1.26.4
    "$PYTHON" -m pip install -q 'setuptools<80' wheel ninja pybind11 regex six sentencepiece nltk ftfy jinja2 tiktoken mpi4py transformers==4.38.0 \
        torchvision==0.21.0 deepspeed==0.17.2
    "$PYTHON" -m pip install -q -e .
    # a bug of DeepSpeed on a CPU: gradient norms with experts, of which one is no tensor
    sed -i 's/FloatTensor(\[\(.*\)\])$/FloatTensor([\1])[0]/' "$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("deepspeed").submodule_search_locations[0])')/runtime/utils.py"
    touch "$folder/environment/installed"
fi
export PATH=$folder/environment/bin:$PATH

if [[ ! -e $folder/edited ]]; then
    for codebase in Megatron-DeepSpeed gpt-neox bigscience; do
        rm -rf "${folder:?}/$codebase"
        cp -rL "$checkouts/$codebase" "$folder/$codebase"
    done
    # tensors have other strides on a CPU
    sed -i -E '295,360s/(query|key|value)_layer = \1_layer\.view\(/\1_layer = \1_layer.reshape(/' "$folder/Megatron-DeepSpeed/megatron/model/transformer.py"
    bloom=$folder/bigscience/megatron
    # CUDA kernels
    sed -i 's/fused_kernels.load(args)/pass/' "$bloom/initialize.py"
    sed -i -E 's/FusedLayerNormAffineFunction\.apply\(/F.layer_norm(/; s/input, (self.weight, self.bias), self.normalized_shape, self.eps/input, self.normalized_shape, \1, self.eps/
        s/input, self.weight, self.bias, self.normalized_shape, self.eps\)/input, self.normalized_shape, self.weight, self.bias, self.eps)/; s/"fused_mix_prec_layer_norm_cuda"\)/"math")/' "$bloom/model/fused_layer_norm.py"
    # names that NumPy dropped, and a config that DeepSpeed takes only once
    sed -i 's/\bnp\.float\b/float/' "$bloom/data/indexed_dataset.py"
    sed -i '/deepspeed.initialize(/,/)$/s/ args=args,//' "$bloom/training.py"
    make -s -C "$folder/Megatron-DeepSpeed/megatron/data"
    make -s -C "$folder/bigscience/megatron/data"
    touch "$folder/edited"
fi
"$PYTHON" launch/codebases/cases.py "$folder" docs/megatron.md "${@:2}"
