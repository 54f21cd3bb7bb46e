"""Writes ``torch.save`` files with objects of DeepSpeed's classes, where DeepSpeed is not imported."""

from __future__ import annotations

import copyreg
import errno
import os
import pickle
from types import ModuleType
from typing import Any

import torch

from elastic_ckpt.formats.torch_archive.calls import MEMBER, Call
from elastic_ckpt.formats.torch_archive.tree import replace_leaves


class _Placeholder:
    """An object of a class that is not imported; each such class has a subclass of this one."""

    __slots__ = ("stand_in",)
    path = ""

    def __init__(self, stand_in: Call) -> None:
        self.stand_in = stand_in

    def __reduce_ex__(self, _protocol: Any) -> Any:
        cls, args = type(self), self.stand_in.args
        if self.stand_in.how == MEMBER:
            return getattr, (cls, *args)
        if args:
            return cls, args
        return copyreg.__newobj__, (cls,), vars(self.stand_in)  # type: ignore[attr-defined]


class _Pickler(pickle._Pickler):
    """Python's own pickler, which can name a class that is not imported."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _Placeholder):
            module, _, of_class = obj.path.rpartition(".")
            self.write(f"c{module}\n{of_class}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


_MODULE: Any = ModuleType(__name__)
_MODULE.Pickler = _Pickler
_classes: dict[str, type[_Placeholder]] = {}


def save(tree: Any, path: str | os.PathLike[str]) -> None:
    """:func:`torch.save` for a tree with stand-ins, which become objects of the classes that they stand for.

    Raises :class:`OSError` if the file cannot be written, of which torch's own writer tells no more than a position.
    """
    try:
        torch.save(replace_leaves(tree, _placeholder, _give), path, pickle_module=_MODULE, pickle_protocol=2)
    except RuntimeError as error:
        text = f"{str(error).partition(chr(10))[0]} (is the disk full?)"
        raise OSError(errno.EIO, text, os.fspath(path)) from error


def _placeholder(leaf: Any) -> Any:
    if type(leaf) is not Call:
        return leaf
    if leaf.name not in _classes:
        _classes[leaf.name] = type("_Named", (_Placeholder,), {"__slots__": (), "path": leaf.name})
    return _classes[leaf.name](leaf)


def _give(_call: Call, made: _Placeholder, attributes: dict[str, Any], _steps: Any) -> None:
    vars(made.stand_in).update(attributes)
