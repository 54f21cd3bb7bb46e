"""Found through ``PYTHONPATH`` by ranks that a framework starts: Accelerate takes the backend from the kind of GPU it finds."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AcceleratesState:
    """Finds ``accelerate.state``, and has it choose gloo."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "accelerate.state" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                module.PartialState._prepare_backend = lambda *_, **__: ("gloo", module.DistributedType.MULTI_CPU)

            spec.loader.exec_module = exec_module
        return spec


def leave() -> None:
    """End the process before its interpreter's teardown, which threads of gloo now and then abort.

    Such a thread still holds a tensor of the last collective and waits for the interpreter's lock (torch's pull request
    179291). Registered first, and so called last; after an exception the process ends as it would, with its exit code.
    """
    if getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if "WORLD_SIZE" in os.environ:  # a rank, and not what starts it
    sys.meta_path.insert(0, AcceleratesState)
    atexit.register(leave)
