"""``cpu_for_cuda.py SCRIPT ARGUMENTS...``: runs a script with the names of ``torch.cuda`` answering for the CPU.

With ``SAVE_AFTER_LOAD``, a folder, the engine saves a checkpoint there as soon as it has loaded one.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class Generators:
    """``torch.cuda.default_generators``: the CPU's, for every device."""

    def __getitem__(self, _device: Any) -> torch.Generator:
        return torch.default_generator


def nothing() -> Callable[..., int]:
    """A new function that does nothing (torch's compiler wants each name to be another object)."""
    return lambda *args, **kwargs: 0


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with ``device="cuda..."`` read as the CPU."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **kwargs | ({"device": CPU} if str(kwargs.get("device")).startswith("cuda") else {}))

    return make


def replace_cuda() -> None:
    """Let the names that the codebases use answer for the CPU."""
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    cuda.current_device = lambda: CPU
    cuda.is_current_stream_capturing = lambda: False
    cuda.default_generators = Generators()
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, nothing())
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        setattr(cuda, name, nothing())
        setattr(cuda, f"max_{name}", nothing())
    cuda.nvtx.range_push, cuda.nvtx.range_pop = nothing(), nothing()
    for name in ("Long", "Float", "Half", "Int", "Byte", "Double", "BFloat16"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    moved: Any = lambda self, *args, **kwargs: self  # noqa: E731
    torch.Tensor.cuda = torch.Tensor.pin_memory = torch.nn.Module.cuda = moved
    for name in ("empty", "zeros", "ones", "rand", "randn", "tensor", "arange", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def module(name: str, **contents: Any) -> None:
    """Stand in for a module that a codebase imports."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(sys.modules[name]).update(contents)


def stand_in_for_apex() -> None:
    """apex and names that torch dropped, as bigscience's code uses them."""

    def norm(_kernel: Any, _overflow: Any, tensors: Any, *_arguments: Any) -> Any:
        return torch.stack([tensor.float().norm() for tensor in tensors[0]]).norm().reshape(1), None

    module("torch._six", inf=float("inf"))
    module("amp_C", multi_tensor_l2norm=None, multi_tensor_scale=None)
    module("apex")
    module("apex.optimizers", FusedAdam=torch.optim.AdamW, FusedSGD=torch.optim.SGD)
    module("apex.multi_tensor_apply", multi_tensor_applier=norm)


def save_after_load(folder: str) -> None:
    """Let engines save what they have loaded."""
    import deepspeed

    load = deepspeed.DeepSpeedEngine.load_checkpoint

    def load_and_save(engine: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(engine, *args, **kwargs)
        engine.save_checkpoint(folder, tag="loaded")
        return loaded

    deepspeed.DeepSpeedEngine.load_checkpoint = load_and_save


if __name__ == "__main__":
    replace_cuda()
    if os.environ.get("STAND_IN_FOR_APEX"):
        stand_in_for_apex()
    if "SAVE_AFTER_LOAD" in os.environ:
        save_after_load(os.environ["SAVE_AFTER_LOAD"])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
