"""Runs a training script on one rank as ``torchrun script.py`` or ``torchrun -m elastic_ckpt.run script.py`` would.

Imported by the process that forks the ranks, so that the frameworks are imported once for all tests.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from typing import Any

import lightning.pytorch
import peft
import torch
import transformers.integrations.bitsandbytes
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.trainer

from tests.integration.on_cpu import let_frameworks_run_on_cpu

IMPORTED = (lightning.pytorch, peft, transformers)


def run(arguments: dict[str, Any]) -> None:
    """Run ``arguments["argv"]`` as ``python`` would; its output also goes to ``arguments["logs"]/rank<n>.log``."""
    torch.set_num_threads(1)
    let_frameworks_run_on_cpu()
    sys.argv = list(arguments["argv"])
    if sys.argv[0] == "-m":
        module = sys.argv.pop(1)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    shutil.copyfile("/proc/self/fd/1", os.path.join(arguments["logs"], f"rank{os.environ['RANK']}.log"))
