"""``install``, ``uninstall`` and flags for a training script; ``install()`` in processes that others start.

The latter by a ``.pth`` file of an environment, or by environment variables. This folder has what both need: a module
that waits for DeepSpeed, and a ``sitecustomize`` that imports it. Such a process imports nothing else of elastic_ckpt
before DeepSpeed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import py_compile
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from elastic_ckpt import config
from elastic_ckpt.config import VARIABLE
from elastic_ckpt.engines import versions
from elastic_ckpt.load.installation._elastic_ckpt_flag import FLAGS, MODES
from elastic_ckpt.patches.argument_parsers import abbreviate_as_before, leave_other_words

_HERE = Path(__file__).parent
_MODULE = "_elastic_ckpt_startup"
_PTH = f"{_MODULE}.pth"
_warn_of_newer = cache(versions.warn_of_newer)  # once, however often a script installs
_FLAG, _UNDERSCORED = FLAGS
_PICKLE_FLAG = "--elastic-trust-pickle"


def install() -> None:
    """Make every DeepSpeed engine of this process load checkpoints of other topologies.

    Call it before or after ``deepspeed.initialize``; with ``"align_partitions"``, before it. Further calls do nothing.
    ``PipelineEngine`` inherits the wrapped method. Warns of untested versions of torch, DeepSpeed and Python. Raises
    :class:`UnsupportedError` if one is missing or too old, or if an untested DeepSpeed lacks a function to wrap.
    """
    versions.refuse_older()
    _warn_of_newer()
    _hook().patch_engine()


def uninstall() -> None:
    """Undo :func:`install`, except for functions that another library has wrapped since."""
    _hook().unpatch_engine()


def _hook() -> Any:
    importlib.import_module("deepspeed")  # may itself install, in processes that others start
    return importlib.import_module("elastic_ckpt.load.hook")


class _SetFlag(argparse.Action):
    """Stores the value in the namespace, and for every engine of this process."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, given: str | None = None
    ) -> None:
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, value)
        config.flags["mode" if self.nargs else "trust_pickle"] = value


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add elastic_ckpt's flags to a training script's parser, in addition to DeepSpeed's, and return it.

    Parsing sets them for the whole process. They override the DeepSpeed config. A parser with its own
    ``--universal-checkpoint``, such as Megatron-DeepSpeed's, keeps it. ``auto``, ``require`` or ``off`` after the flag
    is its value. Any other word is the script's own positional argument, if it has one. After :func:`install`,
    ``deepspeed.add_config_arguments`` adds the flags, too.
    """
    return _add_missing(parser, {"default": None}, {"default": False})


def with_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``deepspeed.add_config_arguments`` with elastic_ckpt's flags, which are left out of the namespace if not given.

    They are added as the parser begins to parse: a script may add arguments of these names until then.
    """
    parser = original(parser)
    add_once = cache(lambda: _add_missing(parser, {"default": argparse.SUPPRESS}, {"default": argparse.SUPPRESS}))

    def with_missing(parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_with_missing(*args: Any, **kwargs: Any) -> Any:
            add_once()
            return parse(*args, **kwargs)

        return parse_with_missing

    for name in ("parse_known_args", "parse_known_intermixed_args"):  # since Python 3.12.8, neither calls the other
        setattr(parser, name, with_missing(getattr(parser, name)))
    return parser


def _add_missing(
    parser: argparse.ArgumentParser, of_mode: dict[str, Any], of_pickle: dict[str, Any]
) -> argparse.ArgumentParser:
    """Add the flags that a parser lacks, each with some options of its own."""
    # whatever the parser does about conflicts: with "resolve", its own flag would be removed
    group = parser.add_argument_group(
        "elastic_ckpt", "loading checkpoints at another topology", conflict_handler="error"
    )
    mode: dict[str, Any] = {"action": _SetFlag, "nargs": "?", "const": "auto", "choices": MODES}
    meaning = "elastic loading: auto (also without a value), require, or off; prefers a universal checkpoint"
    with suppress(argparse.ArgumentError):  # it has its own
        group.add_argument(_FLAG, **mode, **of_mode, help=meaning)
    with suppress(argparse.ArgumentError):
        group.add_argument(_UNDERSCORED, **mode, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    pickle: dict[str, Any] = {"action": _SetFlag, "nargs": 0, "const": True}
    with suppress(argparse.ArgumentError):
        meaning = "let checkpoint files run code while they are read; only for files you trust"
        group.add_argument(_PICKLE_FLAG, **pickle, **of_pickle, help=meaning)
    abbreviate_as_before(parser, lambda action: isinstance(action, _SetFlag), _UNDERSCORED)
    leave_other_words(parser, lambda action: isinstance(action, _SetFlag) and action.nargs == "?", MODES)
    return parser


def variables(mode: str | None = None) -> dict[str, str]:
    """Environment variables with which a process, and all that it starts, installs elastic_ckpt."""
    paths = os.environ.get("PYTHONPATH")  # in which an empty entry is the current folder
    others = [path for path in paths.split(os.pathsep) if path != str(_HERE)] if paths else []
    given = os.environ.get(VARIABLE, "")
    return {
        "PYTHONPATH": os.pathsep.join([str(_HERE), *others]),
        VARIABLE: mode or (given if given != "0" else "1") or "1",
    }


def enabled() -> list[Path]:
    """The ``.pth`` files that :func:`enable` wrote for this interpreter."""
    # asks the system: files in site-packages
    return [file for folder in sys.path if (file := Path(folder, _PTH)).is_file()]


def enable() -> Path:
    """Write the ``.pth`` file, and try it; :class:`OSError` if that fails, or this interpreter does not read it."""
    own = site.getusersitepackages()
    is_own = site.ENABLE_USER_SITE and _HERE.is_relative_to(own)  # pip install --user
    file = Path(own if is_own else sysconfig.get_path("purelib"), _PTH)
    # asks the system: a file in site-packages
    module = shutil.copyfile(_HERE / f"{_MODULE}.py", file.with_suffix(".py"))
    py_compile.compile(str(module))
    file.write_text(f"import {_MODULE}\n", encoding="utf-8")
    code = f"import sys; sys.exit({_MODULE!r} not in sys.modules)"
    if subprocess.run([sys.executable, "-E", "-c", code], check=False, timeout=60).returncode:
        _remove(file)
        raise OSError(f"{sys.executable} reads no .pth files in {file.parent}")
    return file


def disable() -> list[Path]:
    """Remove what :func:`enable` wrote and return the ``.pth`` files; :class:`OSError` if one cannot be removed."""
    found = enabled()
    for file in found:
        _remove(file)
    return found


def _remove(file: Path) -> None:
    module = file.with_suffix(".py")
    for each in (file, module, Path(cache_from_source(str(module)))):
        each.unlink(missing_ok=True)
