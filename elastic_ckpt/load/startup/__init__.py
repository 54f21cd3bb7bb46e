"""``install()`` in processes that others start: by a ``.pth`` file of an environment, or by environment variables.

This folder has what both need: a module that waits for DeepSpeed, and a ``sitecustomize`` that imports it. No process
imports anything else of elastic_ckpt before DeepSpeed.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import site
import subprocess
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

from elastic_ckpt.config import VARIABLE

_HERE = Path(__file__).parent
_MODULE = "_elastic_ckpt_startup"
_PTH = f"{_MODULE}.pth"


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
    return [file for folder in sys.path if (file := Path(folder, _PTH)).is_file()]


def enable() -> Path:
    """Write the ``.pth`` file, and try it; :class:`OSError` if that fails, or this interpreter does not read it."""
    own = site.getusersitepackages()
    is_own = site.ENABLE_USER_SITE and _HERE.is_relative_to(own)  # pip install --user
    file = Path(own if is_own else sysconfig.get_path("purelib"), _PTH)
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
