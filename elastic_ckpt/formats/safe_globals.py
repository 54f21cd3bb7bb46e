"""The classes and functions that a checkpoint's pickles may name beyond torch's own list.

Each is either plain data, of DeepSpeed or of Python, or a stand-in for numpy's array reconstruction; none runs code of
the file's choosing. A name that the installed DeepSpeed does not have is left out: files that need it are then refused.
"""

from __future__ import annotations

import importlib
import pathlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    ("deepspeed.runtime.bf16_optimizer", "fragment_address"),  # its name until September 2022 (0.7.2)
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("_codecs", "encode"),
)
#: In the state of Lightning's callbacks, for one. Made from strings alone, and no file is touched; the second module is
#: Python 3.13's.
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)
_PATH_MODULES = ("pathlib", "pathlib._local")
#: numpy 2 and older name the same functions in different modules.
_NUMPY_CORES = ("numpy._core.multiarray", "numpy.core.multiarray")
#: Enums among Megatron's ``args`` (``enums.py`` of bigscience's and deepspeedai's Megatron-DeepSpeed, and of Megatron).
_MEGATRON_ENUMS = (
    ("megatron.enums", ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")),
    ("megatron.model.enums", ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")),
    ("megatron.core.enums", ("ModelType",)),
    ("megatron.core.transformer.enums", ("LayerType", "AttnType", "AttnMaskType", "AttnBackend")),
)


class ForeignEnum:
    """A member of an enum of Megatron, where the job has not imported it: data alone.

    Attributes:
        said: its value, or its name, whichever the pickle has.
    """

    def __init__(self, said: Any) -> None:
        self.said = said if isinstance(said, (int, str)) else None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.said))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.said!r})"


def enum_member(enum: Any, name: str) -> Enum | ForeignEnum:
    """Stands in for ``getattr``, which Python 3.11.0 to 3.11.3 (Debian 12's) pickles a member of an enum by.

    Raises:
        pickle.UnpicklingError: the first argument is no enum; the real ``getattr`` would open far more than that.
    """
    if enum is ForeignEnum:
        return ForeignEnum(name)
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
    entries += [(path, f"{module}.{path.__name__}") for path in _PATHS for module in _PATH_MODULES]
    entries += [(enum_member, "builtins.getattr"), (enum_member, "__builtin__.getattr")]
    entries += [(DtypeStandIn, "numpy.dtype"), (ArrayStandIn, "numpy.ndarray")]
    for core in _NUMPY_CORES:
        entries += [(reconstruct, f"{core}._reconstruct"), (scalar, f"{core}.scalar")]
    return tuple(entries)


def _megatron_enums() -> list[tuple[Any, str]]:
    """Megatron's own enums where the job has imported them, so that client state has them as it was saved."""
    entries = []
    for module_name, names in _MEGATRON_ENUMS:
        module = sys.modules.get(module_name)  # never imported from here: that would run code because a file says so
        for name in names:
            found = getattr(module, name, None)
            is_enum = isinstance(found, type) and issubclass(found, Enum)
            entries.append((found if is_enum else ForeignEnum, f"{module_name}.{name}"))
    return entries


@contextmanager
def safe_globals() -> Iterator[None]:
    """Allow this module's list for the ``torch.load`` calls inside the context.

    What the process has allowed besides stays allowed; but of one name ours counts. Megatron Core, for one, registers
    numpy's own classes when it is imported, and torch keeps all of them in a set, in no order.
    """
    ours = [*safe_global_list(), *_megatron_enums()]
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
