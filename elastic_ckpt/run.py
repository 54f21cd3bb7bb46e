"""``python -m elastic_ckpt.run train.py --my-args``: run an unchanged training script with elastic loading.

Works under launchers: ``torchrun --nproc_per_node 4 -m elastic_ckpt.run train.py`` and
``deepspeed --module elastic_ckpt.run train.py``. Flags of elastic_ckpt go before the script's name.
"""

from __future__ import annotations

import os
import runpy
import sys

from elastic_ckpt.config import set_flags
from elastic_ckpt.hook import install

_USAGE = """\
usage: python -m elastic_ckpt.run [--universal-checkpoint[=auto|require|off]] [-m] script [script arguments ...]

Run a training script with elastic_ckpt installed: engine.load_checkpoint restores checkpoints of any topology.

  -m                       script is the name of a module, as in python -m
  --universal-checkpoint   auto (the default), require, or off

examples:
  torchrun --nproc_per_node 4 -m elastic_ckpt.run train.py --my-args
  deepspeed --module elastic_ckpt.run train.py --my-args
  torchrun --nproc_per_node 2 -m elastic_ckpt.run --universal-checkpoint=require -m my_package.train
"""


def main(arguments: list[str]) -> None:
    """Install the hook, then run the script in ``arguments`` as ``__main__``.

    DeepSpeed's launcher puts ``--local_rank=N`` before the script's name; it is handed on to the script.
    """
    forwarded: list[str] = []
    as_module = False
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        argument = arguments[position]
        position += 1
        if argument in ("-h", "--help"):
            print(_USAGE)
            return
        if argument == "-m":
            as_module = True
            break
        if argument.startswith(("--local_rank=", "--local-rank=")):
            forwarded.append(argument)
        elif argument.split("=")[0] == "--universal-checkpoint":
            _set_mode(argument.partition("=")[2] or "auto")
        else:
            meant = "; did you mean --universal-checkpoint?" if "universal" in argument else ""
            sys.exit(f"elastic_ckpt.run: unknown flag {argument}{meant}\n\n{_USAGE}")
    if position == len(arguments):
        sys.exit(f"elastic_ckpt.run: which script?\n\n{_USAGE}")
    script = arguments[position]
    sys.argv = [script, *forwarded, *arguments[position + 1 :]]
    install()
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


def _set_mode(mode: str) -> None:
    if mode not in ("auto", "require", "off"):
        sys.exit(f"elastic_ckpt.run: --universal-checkpoint={mode}: choose auto, require or off\n\n{_USAGE}")
    set_flags(mode=mode)


if __name__ == "__main__":
    main(sys.argv[1:])
