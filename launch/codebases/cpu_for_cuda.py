"""``cpu_for_cuda.py SCRIPT ARGUMENTS...``: runs a script with the names of ``torch.cuda`` answering for the CPU.

With ``SAVE_AFTER_LOAD``, a folder, engines save a checkpoint there as soon as they have loaded one.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

CPU = torch.device("cpu")
MEMORY = [f"{most}memory_{kind}" for most in ("", "max_") for kind in ("allocated", "reserved", "cached")]


class Generators:
    """``torch.cuda.default_generators``: the CPU's, for every device."""

    def __getitem__(self, _device: Any) -> torch.Generator:
        return torch.default_generator


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory`` with ``device="cuda..."`` read as the CPU."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **kwargs | ({"device": CPU} if str(kwargs.get("device")).startswith("cuda") else {}))

    return make


def replace_cuda() -> None:
    """Let the names that the codebases use answer for the CPU."""
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    cuda.current_device = lambda: CPU
    cuda.default_generators, cuda._lazy_call = Generators(), lambda call, **kwargs: call()
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", *MEMORY):
        setattr(cuda, name, lambda *args, **kwargs: 0)  # each another function: torch's compiler wants that
    cuda.nvtx.range_push, cuda.nvtx.range_pop = (lambda *args, **kwargs: 0), (lambda *args, **kwargs: 0)
    for name in ("Long", "Float", "Half", "Int", "Byte", "Double", "BFloat16"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    # a number too, as get_norm_with_moe_layers calls it
    type(get_accelerator()).FloatTensor = property(lambda self: functools.partial(torch.tensor, dtype=torch.float))
    for owner, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda")):
        setattr(owner, name, lambda self, *args, **kwargs: self)
    for name in ("empty", "zeros", "ones", "rand", "randn", "tensor", "arange", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def stand_in(name: str, **contents: Any) -> None:
    """Stand in for a module."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)


def stand_in_for_apex() -> None:
    """What bigscience's code imports of apex, and of a torch of its time."""

    def norm(_kernel: Any, _overflow: Any, tensors: Any, *_arguments: Any) -> Any:
        return torch.stack([tensor.float().norm() for tensor in tensors[0]]).norm().reshape(1), None

    stand_in("torch._six", inf=float("inf"))
    stand_in("amp_C", multi_tensor_l2norm=None, multi_tensor_scale=None)
    stand_in("apex")
    stand_in("apex.optimizers", FusedAdam=torch.optim.AdamW, FusedSGD=torch.optim.SGD)
    stand_in("apex.multi_tensor_apply", multi_tensor_applier=norm)


def save_after_load(folder: str) -> None:
    """Let engines save what they have loaded."""
    load = deepspeed.DeepSpeedEngine.load_checkpoint

    def load_and_save(engine: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(engine, *args, **kwargs)
        engine.save_checkpoint(folder, tag="loaded")
        return loaded

    deepspeed.DeepSpeedEngine.load_checkpoint = load_and_save


if __name__ == "__main__":
    replace_cuda()
    if "bigscience" in sys.argv[1]:
        stand_in_for_apex()
    if "SAVE_AFTER_LOAD" in os.environ:
        save_after_load(os.environ["SAVE_AFTER_LOAD"])
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    # all went well; threads of gloo now and then abort the interpreter's teardown
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
