"""The classes and functions that a checkpoint's pickles may name beyond torch's own list.

Each is either a plain data class of DeepSpeed or a stand-in for numpy's array reconstruction; none runs code of the
file's choosing. A name that the installed DeepSpeed does not have is left out: files that need it are then refused.
"""

from __future__ import annotations

import importlib
import pickle
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Any

import torch

from elastic_ckpt.formats.safe_numpy import ArrayStandIn, DtypeStandIn, reconstruct, scalar

_SAFE_NAMES = (
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("_codecs", "encode"),
)
#: numpy 2 and older name the same functions in different modules.
_NUMPY_CORES = ("numpy._core.multiarray", "numpy.core.multiarray")


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
    entries += [(enum_member, "builtins.getattr"), (enum_member, "__builtin__.getattr")]
    entries += [(DtypeStandIn, "numpy.dtype"), (ArrayStandIn, "numpy.ndarray")]
    for core in _NUMPY_CORES:
        entries += [(reconstruct, f"{core}._reconstruct"), (scalar, f"{core}.scalar")]
    return tuple(entries)


def safe_globals() -> AbstractContextManager[None]:
    """Allow this module's list for the ``torch.load`` calls inside the context."""
    return torch.serialization.safe_globals(list(safe_global_list()))
