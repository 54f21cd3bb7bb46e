"""``python -m elastic_ckpt.run train.py --my-args``: run an unchanged training script with elastic loading.

Works under launchers: ``torchrun --nproc_per_node 4 -m elastic_ckpt.run train.py`` and
``deepspeed --module elastic_ckpt.run train.py``. Flags of elastic_ckpt precede the script's name. Processes that the
script starts get elastic_ckpt installed too.
"""

from __future__ import annotations

import os
import sys
from collections import deque

from elastic_ckpt.load import startup

_MODES = ("auto", "require", "off")
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
    """Replace this process by Python running the script in ``arguments``, with elastic_ckpt installed.

    DeepSpeed's launcher puts ``--local_rank=N`` before the script's name; it is passed on to the script.
    """
    words, given = deque(arguments), None
    option: list[str] = []
    forwarded: list[str] = []
    while words and words[0].startswith("-") and not option:
        argument = words.popleft()
        flag, _, mode = argument.partition("=")
        if argument in ("-h", "--help"):
            print(_USAGE)
            return
        if argument == "-m":
            option = ["-m"]
        elif flag in ("--local_rank", "--local-rank") and argument != flag:
            forwarded.append(argument)
        elif flag == "--universal-checkpoint":
            if argument == flag and words and words[0] in _MODES:  # and not the script's name
                mode = words.popleft()
            if mode and mode not in _MODES:
                sys.exit(f"elastic_ckpt.run: --universal-checkpoint={mode}: choose auto, require or off\n\n{_USAGE}")
            given = mode or "auto"
        else:
            meant = "; did you mean --universal-checkpoint?" if "universal" in argument else ""
            sys.exit(f"elastic_ckpt.run: unknown flag {argument}{meant}\n\n{_USAGE}")
    if not words:
        sys.exit(f"elastic_ckpt.run: which script?\n\n{_USAGE}")
    if sys.flags.ignore_environment:
        sys.exit("elastic_ckpt.run: Python's options -E and -I ignore the variables that install elastic_ckpt")
    own = ["-m", "elastic_ckpt.run", *arguments]
    python = sys.orig_argv[1 : -len(own)] if sys.orig_argv[-len(own) :] == own else []  # its options, such as -u
    command = [sys.executable, *python, *option, words.popleft(), *forwarded, *words]
    os.execve(sys.executable, command, {**os.environ, **startup.variables(given), "ELASTIC_CKPT_RUN": "1"})


if __name__ == "__main__":
    main(sys.argv[1:])
