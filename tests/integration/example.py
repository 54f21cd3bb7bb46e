"""Runs a script on one rank as ``torchrun script.py`` does, and compares what it loads with what another one saved.

The script itself is as a user has it: nothing in it knows of the comparison.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import elastic_ckpt
from tests.distributed.truth import relink, state_keys
from tests.integration.pages import EQUAL
from tests.integration.script import IMPORTED as FRAMEWORKS

IMPORTED = (FRAMEWORKS, importlib.import_module("megatron.core.models.gpt") if find_spec("megatron") else None)


def run(arguments: dict[str, Any]) -> None:
    """Run ``arguments["argv"]`` in ``arguments["cwd"]``; its output also goes to ``arguments["logs"]/rank<n>.log``."""
    torch.set_num_threads(1)
    os.chdir(arguments["cwd"])
    os.environ.update(arguments["env"])
    for name, value in {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "GROUP_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    _compare_around_install(Path(arguments["logs"]).parent)
    sys.argv = list(arguments["argv"])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    shutil.copyfile("/proc/self/fd/1", os.path.join(arguments["logs"], f"rank{os.environ['RANK']}.log"))


def _compare_around_install(folder: Path) -> None:
    """Have ``elastic_ckpt.install`` wrap saves and loads once more: after a save its tensors are kept, after a load compared."""
    install = elastic_ckpt.install

    def installed() -> None:
        from deepspeed import DeepSpeedEngine

        install()
        save, load = DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint

        def save_checkpoint(engine: Any, save_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
            saved = save(engine, save_dir, tag, *args, **kwargs)
            held = _held(engine)
            tag = tag or f"global_step{engine.global_steps}"
            if dist.get_rank() == 0 and held:
                torch.save(held, folder / f"{Path(save_dir).name}-{tag}.pt")
                torch.save(held, folder / f"{tag}.pt")  # of a folder that was copied elsewhere
            return saved

        def load_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
            path, client_state = load(engine, *args, **kwargs)
            if path and engine.elastic_report is not None:
                save_dir, tag = Path(path).parent.parts[-2:]
                kept = [folder / f"{name}.pt" for name in (f"{save_dir}-{tag}", tag)]
                if files := [file for file in kept if file.exists()]:
                    _compare(torch.load(files[0]), _held(engine))
            return path, client_state

        DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint = save_checkpoint, load_checkpoint

    elastic_ckpt.install = installed


def _held(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and states by name, whole. Collective. Nothing of tensor parallelism, experts and states in 8 bits."""
    if engine.mp_world_size > 1 or engine.has_moe_layers:
        return {}
    relink(engine)
    eight_bit = any("bitsandbytes" in type(each).__module__ for each in (engine.optimizer.optimizer,))
    keys = [] if eight_bit else state_keys(engine)
    held = {}
    for name, param in engine.module.named_parameters():
        held[name] = safe_get_full_fp32_param(param).clone()
        for key in keys:
            held[f"{name}: {key}"] = safe_get_full_optimizer_state(param, key).clone()
    return held


def _compare(saved: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    assert saved.keys() == loaded.keys()
    assert [name for name, value in saved.items() if not torch.equal(value, loaded[name])] == []
    if dist.get_rank() == 0:
        print(EQUAL.format(len(saved)), flush=True)
