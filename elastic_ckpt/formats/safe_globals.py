"""The classes and functions that a checkpoint's pickles may name beyond torch's own list.

Each is either a plain data class of DeepSpeed or numpy's array reconstruction; none runs code of the file's
choosing. A name that the installed DeepSpeed does not have is left out: files that need it are then refused.
"""

from __future__ import annotations

import importlib
import pickle
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Any

import torch

_SAFE_NAMES = (
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    # numpy arrays and RNG states, which people keep in client_state
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("_codecs", "encode"),
)
_NUMPY_DTYPES = ("Bool", "UInt8", "Int8", "UInt16", "Int16", "UInt32", "Int32", "UInt64", "Int64")
_NUMPY_FLOATS = ("Float16", "Float32", "Float64")
#: numpy 1.x and older pickles name the same functions here.
_OLD_NUMPY = {"numpy._core.multiarray": "numpy.core.multiarray"}


def enum_member(enum: Any, name: str) -> Enum:
    """Stands in for ``getattr``, which Python 3.11.0 to 3.11.3 (Debian 12's) pickles a member of an enum by.

    Raises:
        pickle.UnpicklingError: the first argument is no enum; the real ``getattr`` would open far more than that.
    """
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise pickle.UnpicklingError("Unsupported GLOBAL builtins.getattr of something that is not an enum")
    return enum[name]


@cache
def safe_global_list() -> tuple[Any, ...]:
    """Entries for :func:`torch.serialization.safe_globals`: objects, or (object, "name in the pickle")."""
    entries: list[Any] = []
    for module_name, name in _SAFE_NAMES:
        try:
            found = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError):
            continue
        entries.append((found, f"{module_name}.{name}"))
        if module_name in _OLD_NUMPY:
            entries.append((found, f"{_OLD_NUMPY[module_name]}.{name}"))
    entries += [(enum_member, "builtins.getattr"), (enum_member, "__builtin__.getattr")]
    numpy_dtypes = importlib.import_module("numpy.dtypes")
    entries += [getattr(numpy_dtypes, f"{kind}DType") for kind in _NUMPY_DTYPES + _NUMPY_FLOATS]
    return tuple(entries)


def safe_globals() -> AbstractContextManager[None]:
    """Allow this module's list for the ``torch.load`` calls inside the context."""
    return torch.serialization.safe_globals(list(safe_global_list()))
