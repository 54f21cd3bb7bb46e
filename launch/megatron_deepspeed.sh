#!/usr/bin/env bash
# Nightly: the training codebases that are built on DeepSpeed, saved and resumed on a CPU; the table goes to docs/megatron.md.
#   bash launch/megatron_deepspeed.sh FOLDER             all of them; hours on 2 cores
#   bash launch/megatron_deepspeed.sh FOLDER gpt-neox    models whose names contain one of the words
# FOLDER has checkouts Megatron-DeepSpeed (commit 4efb479d), gpt-neox (ea7aefd8) and bigscience (8387ae17 of
# bigscience-workshop/Megatron-DeepSpeed), which are copied and edited as below. Environment, copies and runs are kept
# below MATRIX_FOLDER (.matrix). python3 is 3.10 to 3.12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checkouts=$(realpath "$1")
folder=$(realpath -m "${MATRIX_FOLDER:-.matrix}")/codebases
export PATH=$folder/environment/bin:$PATH DS_ACCELERATOR=cpu
if [[ ! -e $folder/environment/installed ]]; then
    python3 -m venv "$folder/environment"
    pip install -q torch==2.6.0 numpy==1.26.4 'setuptools<80' wheel ninja
    pip install -q pybind11 regex six sentencepiece nltk ftfy jinja2 tiktoken mpi4py transformers==4.38.0 torchvision==0.21.0 deepspeed==0.17.2
    pip install -q -e .
    touch "$folder/environment/installed"
fi
if [[ ! -e $folder/edited ]]; then
    for codebase in Megatron-DeepSpeed gpt-neox bigscience; do
        rm -rf "${folder:?}/$codebase"
        cp -rL "$checkouts/$codebase" "$folder/$codebase"
    done
    megatron=$folder/Megatron-DeepSpeed/megatron bloom=$folder/bigscience/megatron
    # tensors have other strides on a CPU
    sed -i -E '295,360s/(query|key|value)_layer = \1_layer\.view\(/\1_layer = \1_layer.reshape(/' "$megatron/model/transformer.py"
    # CUDA kernels
    sed -i 's/fused_kernels.load(args)/pass/' "$bloom/initialize.py"
    sed -i 's/FusedLayerNormAffineFunction.apply(/F.layer_norm(/; s/"fused_mix_prec_layer_norm_cuda")/"math")/
        s/input, self.weight, self.bias, self.normalized_shape, self.eps)/input, self.normalized_shape, self.weight, self.bias, self.eps)/' "$bloom/model/fused_layer_norm.py"
    # a name that NumPy dropped, and a config that DeepSpeed now takes only once
    sed -i 's/\bnp\.float\b/float/' "$bloom/data/indexed_dataset.py"
    sed -i '/deepspeed.initialize(/,/)$/s/ args=args,//' "$bloom/training.py"
    make -s -C "$megatron/data"
    make -s -C "$bloom/data"
    PYTHONPATH=$folder/Megatron-DeepSpeed python launch/codebases/write_data.py "$folder"
    touch "$folder/edited"
fi
python launch/codebases/cases.py "$folder" docs/megatron.md "${@:2}"
