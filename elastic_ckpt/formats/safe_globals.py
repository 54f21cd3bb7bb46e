"""The classes and functions that a checkpoint's pickles may name beyond torch's own list.

Each is plain data, of DeepSpeed or of Python, or a stand-in; none runs code of the file's choosing. Names that the
installed DeepSpeed lacks are left out, and files that need them are refused.

numpy's own reconstruction passes the pickle's state to ``dtype.__setstate__`` unchecked: a hostile or damaged state can
corrupt numpy's shared dtypes for the whole process. Stand-ins take its place, which accept only plain numeric dtypes
and check sizes; :func:`finished` turns one into its array or dtype.
"""

from __future__ import annotations

import importlib
import math
import pathlib
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch

_SAFE_NAMES = (
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.bf16_optimizer", "fragment_address"),  # its name until September 2022 (0.7.2)
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("_codecs", "encode"),
)
_NUMERIC = re.compile(r"[?biufc]\d{0,2}")
#: Enums among Megatron's ``args`` (``enums.py`` of bigscience's and deepspeedai's Megatron-DeepSpeed, and of Megatron).
_MEGATRON_ENUMS = (
    ("megatron.enums", ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")),
    ("megatron.model.enums", ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")),
    ("megatron.core.enums", ("ModelType",)),
    ("megatron.core.transformer.enums", ("LayerType", "AttnType", "AttnMaskType", "AttnBackend")),
)


@dataclass(unsafe_hash=True)
class ForeignEnum:
    """A member, by value or by name as in the pickle, of a Megatron enum that the job has not imported."""

    member: Any

    def __post_init__(self) -> None:
        self.member = self.member if isinstance(self.member, (int, str)) else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.member!r})"


def enum_member(enum: Any, name: str) -> Enum | ForeignEnum:
    """Stands in for ``getattr``, with which Python 3.11.0 to 3.11.3 (Debian 12's) pickles enum members.

    Raises :class:`pickle.UnpicklingError` for anything but an enum: the real ``getattr`` would reach far more.
    """
    if enum is ForeignEnum:
        return ForeignEnum(name)
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise pickle.UnpicklingError("Unsupported GLOBAL builtins.getattr of something that is not an enum")
    return enum[name]


class DtypeStandIn:
    """Stands in for ``numpy.dtype(spec, align, copy)``."""

    def __init__(self, spec: Any = None, align: Any = False, copy: Any = True) -> None:
        self.spec = spec.decode("ascii") if isinstance(spec, bytes) else spec
        self.byteorder = "|"

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self.byteorder = order.decode("ascii") if isinstance(order, bytes) else order

    def dtype(self) -> np.dtype[Any]:
        """The dtype itself; a :class:`pickle.UnpicklingError` unless it is a plain numeric one."""
        if not isinstance(self.spec, str) or not _NUMERIC.fullmatch(self.spec) or self.byteorder not in "<>|=":
            raise pickle.UnpicklingError(f"Unsupported GLOBAL numpy.dtype of {self.spec!r}: numeric ones only")
        return np.dtype(self.spec).newbyteorder(self.byteorder)  # type: ignore[arg-type]


class ArrayStandIn:
    """Stands in for ``numpy.ndarray``, between its creation and its state."""

    value: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, is_fortran, data = state
        self.value = _from_bytes(dtype, data, math.prod(shape)).reshape(shape, order="F" if is_fortran else "C")


def _reconstruct(kind: Any, shape: Any, typecode: Any) -> ArrayStandIn:
    """Stands in for ``numpy._core.multiarray._reconstruct``, whose arguments are placeholders."""
    return ArrayStandIn()


def _scalar(dtype: Any, data: Any) -> Any:
    """Stands in for ``numpy._core.multiarray.scalar``."""
    return _from_bytes(dtype, data, 1)[0]


def _from_bytes(dtype: Any, data: Any, numel: int) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, DtypeStandIn):
        raise pickle.UnpicklingError("an array without a dtype")
    plain = dtype.dtype()
    if not isinstance(data, bytes) or len(data) != numel * plain.itemsize:
        raise pickle.UnpicklingError(f"bytes that are not an array of {numel} {plain}")
    return np.frombuffer(data, dtype=plain).astype(plain.newbyteorder("="))


def finished(leaf: Any) -> Any:
    """The array or dtype of a stand-in; any other object as it is."""
    return leaf.value if isinstance(leaf, ArrayStandIn) else leaf.dtype() if isinstance(leaf, DtypeStandIn) else leaf


@cache
def _safe_global_list() -> tuple[Any, ...]:
    """Entries for :func:`torch.serialization.safe_globals`: (object, "name in the pickle")."""
    entries: list[Any] = []
    for module_name, name in _SAFE_NAMES:
        try:
            entries.append((getattr(importlib.import_module(module_name), name), f"{module_name}.{name}"))
        except (ImportError, AttributeError):
            continue
    # paths, as in the state of Lightning's callbacks: made from strings alone, without touching a file
    for module_name in ("pathlib", "pathlib._local"):  # the second is Python 3.13's
        entries += [(path, f"{module_name}.{path.__name__}") for path in (pathlib.PosixPath, pathlib.PurePosixPath)]
    entries += [(enum_member, "builtins.getattr"), (enum_member, "__builtin__.getattr")]
    entries += [(DtypeStandIn, "numpy.dtype"), (ArrayStandIn, "numpy.ndarray")]
    for core in ("numpy._core.multiarray", "numpy.core.multiarray"):  # of numpy 2, and of older ones
        entries += [(_reconstruct, f"{core}._reconstruct"), (_scalar, f"{core}.scalar")]
    return tuple(entries)


def _megatron_enums() -> Iterator[tuple[Any, str]]:
    """Megatron's own enums if the job has imported them, so that client state has them as saved."""
    for module_name, names in _MEGATRON_ENUMS:
        module = sys.modules.get(module_name)  # never imported from here: that would run code because a file says so
        for name in names:
            found = getattr(module, name, None)
            is_enum = isinstance(found, type) and issubclass(found, Enum)
            yield found if is_enum else ForeignEnum, f"{module_name}.{name}"


@contextmanager
def safe_globals() -> Iterator[None]:
    """Allow this module's list in ``torch.load`` calls inside the context.

    What the process has allowed besides stays allowed, except under our names: Megatron Core, for one, registers
    numpy's own classes when imported, and torch keeps all of them in an unordered set.
    """
    ours = [*_safe_global_list(), *_megatron_enums()]
    names = {name for _, name in ours}
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*(entry for entry in before if _name_of(entry) not in names), *ours])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _name_of(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
