"""Writes ``torch.save`` files with objects of DeepSpeed's classes, where DeepSpeed is not imported."""

from __future__ import annotations

import copyreg
import errno
import io
import os
import pickle
import shutil
from types import ModuleType
from typing import Any

import torch

from elastic_ckpt.formats.torch_archive.stand_ins import StandIn
from elastic_ckpt.formats.torch_archive.tree import replace_leaves

#: With less room than this, a file that could not be written is taken for one of a full disk.
_LEAST_FREE_NBYTES = 1 << 20


class _Placeholder:
    """An object of a class that is not imported; each such class has a subclass of this one in this module."""

    __slots__ = ("stand_in",)
    path = ""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in

    def __reduce_ex__(self, _protocol: Any) -> Any:
        cls, args = type(self), self.stand_in.args
        if self.stand_in.is_by_name:
            return getattr, (cls, *args)
        if args:
            return cls, args
        return copyreg.__newobj__, (cls,), vars(self.stand_in)  # type: ignore[attr-defined]


class _Pickler(pickle.Pickler):
    """Writes the names of the classes that placeholders stand for: names of protocol 2 are lines of text."""

    def __init__(self, file: Any, protocol: int) -> None:
        self._file, self._buffer = file, io.BytesIO()
        super().__init__(self._buffer, protocol)

    def dump(self, obj: Any) -> None:
        super().dump(obj)
        pickled = self._buffer.getvalue()
        for cls in _Placeholder.__subclasses__():
            module, _, name = cls.path.rpartition(".")
            pickled = pickled.replace(f"c{__name__}\n{cls.__name__}\n".encode(), f"c{module}\n{name}\n".encode())
        self._file.write(pickled)


_MODULE: Any = ModuleType(__name__)
_MODULE.Pickler = _Pickler


def save(tree: Any, path: Any) -> None:
    """:func:`torch.save` for a tree with stand-ins, which become objects of the classes that they stand for.

    Raises :class:`OSError` if the file cannot be written, of which torch's own writer tells no more than a position.
    """
    try:
        torch.save(replace_leaves(tree, _placeholder), path, pickle_module=_MODULE, pickle_protocol=2)
    except RuntimeError as error:
        is_full = shutil.disk_usage(os.path.dirname(path)).free < _LEAST_FREE_NBYTES
        code = errno.ENOSPC if is_full else errno.EIO
        text = os.strerror(code) if is_full else str(error).partition("\n")[0]
        raise OSError(code, text, os.fspath(path)) from error


def _placeholder(leaf: Any) -> Any:
    if type(leaf) is not StandIn:
        return leaf
    name = "_" + leaf.name.replace(".", "_")
    if name not in globals():
        globals()[name] = type(name, (_Placeholder,), {"__module__": __name__, "__slots__": (), "path": leaf.name})
    return globals()[name](leaf)
