"""Runs an unchanged training script with elastic loading; processes that it starts get elastic_ckpt installed too.

usage: python -m elastic_ckpt.run [--universal-checkpoint[=auto|require|off]] [-m] script [script arguments ...]

Run a training script with elastic_ckpt installed: engine.load_checkpoint restores checkpoints of any topology.

  -m                       script is the name of a module, as in python -m
  --universal-checkpoint   auto (the default), require, or off. You can also give it among the script's arguments,
                           unless the script has such a flag itself

examples:
  torchrun --nproc_per_node 4 -m elastic_ckpt.run train.py --my-args --universal-checkpoint
  deepspeed --module elastic_ckpt.run train.py --my-args
  torchrun --nproc_per_node 2 -m elastic_ckpt.run --universal-checkpoint=require -m my_package.train
"""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from collections import deque
from collections.abc import Callable
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from elastic_ckpt.config import VARIABLE
from elastic_ckpt.load.installation import install, variables
from elastic_ckpt.load.installation._elastic_ckpt_flag import FLAGS, MODES, take_flag

_USAGE = (__doc__ or "").partition("\n\n")[2]


def main(arguments: list[str]) -> None:
    """Install the hook, then run the script in ``arguments`` as ``__main__``.

    DeepSpeed's launcher puts ``--local_rank=N`` before the script's name; it is passed on to the script.
    """
    forwarded: list[str] = []
    words = deque(arguments)
    run: Callable[[str], None] = _run_script
    while words and words[0].startswith("-") and run is _run_script:
        argument = words.popleft()
        flag, _, mode = argument.partition("=")
        if argument in ("-h", "--help"):
            print(_USAGE)
            return
        if argument == "-m":
            run = _run_module
        elif flag in ("--local_rank", "--local-rank") and argument != flag:
            forwarded.append(argument)
        elif flag in FLAGS:
            if argument == flag and words and words[0] in MODES:  # and not the script's name
                mode = words.popleft()
            if mode and mode not in MODES:
                sys.exit(f"elastic_ckpt.run: --universal-checkpoint={mode}: choose auto, require or off\n\n{_USAGE}")
            os.environ[VARIABLE] = mode or "auto"
        else:
            meant = "; did you mean --universal-checkpoint?" if "universal" in argument else ""
            sys.exit(f"elastic_ckpt.run: unknown flag {argument}{meant}\n\n{_USAGE}")
    if not words:
        sys.exit(f"elastic_ckpt.run: which script?\n\n{_USAGE}")
    script = words.popleft()
    sys.argv = [script, *forwarded, *words]
    os.environ.update(variables())  # for processes that the script starts
    take_flag(sys.argv[1:])
    install()
    run(script)


def _run_script(script: str) -> None:
    """Like ``python script``."""
    path = os.path.abspath(script)
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # replaces the entry of -m
    if pkgutil.get_importer(path) is not None:  # a folder or an archive
        runpy.run_path(path, run_name="__main__")
        return
    with io.open_code(path) as stream:
        code = compile(stream.read(), path, "exec", dont_inherit=True)
    _run_as_main(code, __file__=path, __loader__=SourceFileLoader("__main__", path))


def _run_module(name: str) -> None:
    """Like ``python -m name``."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        sys.exit(f"elastic_ckpt.run: No module named {name!r} that can be run")
    sys.argv[0] = spec.origin or name
    _run_as_main(code, __file__=spec.origin, __loader__=spec.loader, __package__=spec.parent, __spec__=spec)


def _run_as_main(code: CodeType, **attributes: Any) -> None:
    """Run code in a ``__main__`` that persists, unlike :mod:`runpy`'s.

    Threads and exit handlers need it; objects that spawned processes return need its second name.
    """
    module = ModuleType("__main__")
    vars(module).update({"__annotations__": {}, "__cached__": None, **attributes})
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
