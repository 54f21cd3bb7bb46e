"""The closed list of names that a checkpoint's pickles may use, and what is made of their arguments and states.

torch's own names since 1.6, containers and numbers of Python, arrays of numpy 1 and 2, and the small classes that
DeepSpeed, Megatron and ``torch.distributed.checkpoint`` pickle, under every module path that they had. None of them
runs code of the file's choosing. Others are named, and called by nobody here, if the user allowed them.
"""

from __future__ import annotations

import argparse
import importlib
import math
import operator
import pathlib
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum, IntEnum
from functools import cache, partial
from typing import Any

import numpy as np

from elastic_ckpt.core.flat_ranges import checked_shape
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import (
    STAGES,
    Call,
    Global,
    How,
    Size,
    checked_keys,
    described,
    refuse_errors,
    unsafe_error,
)
from elastic_ckpt.formats.torch_archive.known_values import (
    DTYPES,
    LAYOUTS,
    QSCHEMES,
    STAGE_ENUM,
    check_device,
    check_made,
    check_member,
    check_printable,
)
from elastic_ckpt.formats.torch_archive.tensors import (
    REBUILD,
    STORAGE_NAMES,
    UNREADABLE,
    kind_error,
    subclass_error,
)

ARRAY = "numpy.ndarray"
BUFFER = "numpy.frombuffer"
DTYPE = "numpy.dtype"
NAMESPACE = "types.SimpleNamespace"
STREAM = "_io.BytesIO"
#: Where this numpy has the functions that rebuild its arrays.
MULTIARRAY: str = np.zeros(1).__reduce__()[0].__module__
#: Classes of Python that are made of plain parts, where their result is wanted (:mod:`elastic_ckpt.formats.objects`).
PLAIN_CLASSES = frozenset(
    (
        *("collections.deque", "collections.defaultdict", NAMESPACE, "builtins.slice", "builtins.range"),
        *("datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone"),
        *("decimal.Decimal", "fractions.Fraction"),
    )
)
#: Their parts.
_PARTS = frozenset({int, float, bool, type(None), Global})
#: Long texts take long to become numbers, "1e999999999" an endless fraction.
_LONGEST_TEXT = 1 << 10
_FRACTION = re.compile(r"-?\d+(?:/\d+)?")
#: What torch itself adds to the list of whoever imports it, and what starts to talk to other ranks where it is called.
_COLLECTIVE = frozenset({"torch.distributed.device_mesh.DeviceMesh", "torch.distributed.device_mesh.init_device_mesh"})
#: Modules whose names are refused even where the user allowed one, as torch does.
_BLOCKED = frozenset({"sys", "os", "posix", "nt"})
_DCP = "torch.distributed.checkpoint"
_ENUMS_OF_MEGATRON = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType", "AttnBackend")
_MODULES_OF_MEGATRON = ("enums", "model.enums", "core.enums", "core.transformer.enums")
#: Enums and classes with plain data, under every module path that they had.
_ENUMS = (
    STAGE_ENUM,
    *(f"megatron.{module}.{name}" for module in _MODULES_OF_MEGATRON for name in _ENUMS_OF_MEGATRON),
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    f"{_DCP}.planner.WriteItemType",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",  # until torch 2.2
)
_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",  # until September 2022 (0.7.2)
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")),
    *(f"{_DCP}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    f"{_DCP}.filesystem._StorageInfo",
    *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
    *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
)
#: Classes whose state is a tuple: the attributes in it, the last of them since torch 2.14.
_OF_TUPLES = dict.fromkeys(
    (f"{_DCP}.metadata.TensorProperties", "torch.distributed._shard.sharded_tensor.metadata.TensorProperties"),
    ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"),
)
#: Names that torch no longer has for what it still has.
_RENAMED = {"torch.storage._UntypedStorage": "torch.storage.UntypedStorage"}  # until 1.13
#: Dtypes of numpy: numbers, strings of one length, dates and durations; the units of these.
_PLAIN_DTYPE = re.compile(r"[?biufc]\d{0,2}|[US]\d{1,6}|[mM]8")
_UNIT = re.compile(rb"[a-zA-Z]{1,7}")
_MOST_UNITS = 1 << 30
_MOST_PATH_PARTS = 1 << 11  # as Linux has them


def find_global(module: str, name: str) -> Global:
    """The entry of a name. One that is not on the list, and that the user did not allow, has an error."""
    path = _RENAMED.get(f"{module}.{name}", f"{module}.{name}")
    if path == DTYPE and path in _users_globals():
        return Global(path, partial(_numpy_dtype, is_any=True))
    if (entry := _closed_list().get(path)) is not None:
        return entry
    if path in STORAGE_NAMES or path in DTYPES or path in QSCHEMES:
        return Global(path)
    if module not in _BLOCKED and path not in _COLLECTIVE and path in (users := _users_globals()):
        return Global(path, users=users[path])
    if path in UNREADABLE:
        return Global(path, error=kind_error(path))
    is_torchao = module.partition(".")[0] == "torchao"
    return Global(path, error=subclass_error(path) if is_torchao else unsafe_error(path))


def find_trusted(module: str, name: str) -> Global:
    """The entry of a name in a trusted pickle, which is imported if it is not on the list."""
    path = f"{module}.{name}"
    if path == DTYPE:
        return Global(path, partial(_numpy_dtype, is_any=True))
    if path == "torch.device":  # of any backend, which torch may know here
        return Global(path, _later(path, str, (int, type(None))))
    entry = find_global(module, name)
    if entry.error is None and path != "builtins.getattr":
        return entry
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        text = "this file holds an object of a class that cannot be imported here"
        remedy = "install its package, or import the module that has it before loading"
        return Global(path, error=UnsupportedError(text, found=f"{path}: {error}"[:300], remedy=remedy))
    return Global(path, users=found)


def _users_globals() -> dict[str, Any]:
    """What the user passed to :func:`torch.serialization.add_safe_globals`, by qualified name."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch.serialization, "get_safe_globals"):
        return {}
    pairs = [each if isinstance(each, tuple) else (each, "") for each in torch.serialization.get_safe_globals()]
    return {name or f"{each.__module__}.{each.__qualname__}": each for each, name in pairs}


@cache
def _closed_list() -> dict[str, Global]:
    calls: dict[str, Callable[..., Any] | None] = {
        "argparse.Namespace": argparse.Namespace,  # which takes keywords alone
        "collections.OrderedDict": _ordered_dict,
        "collections.Counter": _typed(Counter, dict),
        "builtins.set": lambda items=(): set(checked_keys(items)),
        "builtins.frozenset": lambda items=(): frozenset(checked_keys(items)),
        "builtins.complex": _typed(complex, float, float),
        "builtins.bytearray": _byte_array,
        "builtins.bytes": lambda: b"",  # only empty ones are pickled so, in protocols below 3
        "builtins.getattr": _enum_member,
        **dict.fromkeys(map("builtins.{}".format, ("object", "list", "dict", "tuple", "str", "int", "float", "bool"))),
        "_codecs.encode": _encoded,
        "torch.Size": Size,
        "torch.Tensor": None,
        "torch.nn.parameter.Parameter": None,
        "torch.device": _later("torch.device", str, (int, type(None)), check=check_device),
        "torch.serialization._get_layout": _layout,
        DTYPE: _numpy_dtype,
        ARRAY: None,
        **REBUILD,
        **{path: _later(path, how="new") for path in (*_CLASSES, *_OF_TUPLES)},
        **{path: _later(path, (int, str), check=partial(check_member, path)) for path in _ENUMS},
        **{path: partial(_of_python, path) for path in PLAIN_CLASSES},
        STREAM: _later(STREAM, how="new"),
    }
    for module in ("pathlib", "pathlib._local"):  # the second is Python 3.13's
        for cls in (pathlib.PosixPath, pathlib.PurePosixPath):
            calls[f"{module}.{cls.__name__}"] = _typed(cls, *(str,) * _MOST_PATH_PARTS)  # touches no file
    for core in ("numpy._core", "numpy.core"):  # of numpy 2, and of older ones
        calls[f"{core}.multiarray._reconstruct"] = _numpy_array
        calls[f"{core}.multiarray.scalar"] = _numpy_scalar
        calls[f"{core}.numeric._frombuffer"] = _numpy_buffer
    functions = {"builtins.getattr", "_codecs.encode", "torch.serialization._get_layout", *REBUILD}
    functions |= {path for path in calls if path.startswith(("numpy.core.", "numpy._core."))}
    return {
        path: Global(path, call, copies=path not in REBUILD, is_function=path in functions)
        for path, call in calls.items()
    }


def set_state(target: Any, state: Any) -> None:
    """Give an object the state that a BUILD opcode has for it; :class:`pickle.UnpicklingError` for other objects."""
    kind = type(target)
    is_call = type(target) is Call
    if kind is Global and target.error is not None:
        return
    if is_call and target.name in _OF_TUPLES and type(state) is tuple:
        state = dict(zip(_OF_TUPLES[target.name], state, strict=False))
    is_users = is_call and target.is_users
    is_new = is_call and target.how == "new"
    if is_call and target.name == ARRAY and not is_users:
        _version, shape, dtype, _is_fortran, data = state
        _check_elements(dtype, data, shape)
    elif is_call and target.name == DTYPE and not is_users:
        _check_dtype(target, state)
    elif is_call and target.name == STREAM and not is_users:
        _check_stream(state)
    elif not is_users:
        is_namespace = is_call and target.name == NAMESPACE
        if not (is_namespace or is_new or kind in (argparse.Namespace, OrderedDict)):
            raise pickle.UnpicklingError(f"an object of type {kind.__name__} is given a state")
        owner = argparse.Namespace if is_namespace else kind
        if type(state) is not dict or not all(is_attribute(key, owner) for key in state):
            raise pickle.UnpicklingError(f"a state of {kind.__name__} that is no dictionary of attributes")
        if not is_namespace:
            vars(target).update(state)
            return
    target.steps.append(("state", [state]))


def is_attribute(key: Any, kind: type = argparse.Namespace) -> bool:
    """Whether a key of a state can be an attribute: none that Python or the class gives a meaning."""
    return type(key) is str and not key.startswith("__") and not hasattr(kind, key)


def _check_stream(state: Any) -> None:
    """The bytes of a stream, a position in them, and no attributes; from one behind them, writing would fill up."""
    data, position, attributes = state
    if type(data) not in (bytes, bytearray) or type(position) is not int or attributes:
        raise pickle.UnpicklingError("a stream of something other than bytes")
    if not 0 <= position <= len(data):
        raise pickle.UnpicklingError(f"a stream of {len(data)} bytes at position {position}")


def _check_dtype(target: Call, state: Any) -> None:
    """The state of a plain dtype: numpy's own ``__setstate__`` does not check a hostile one."""
    version, order, *more, itemsize, alignment, flags = state[:8]
    spec = target.args[0]
    units = state[8:]
    is_number = (itemsize, alignment, flags) == (-1, -1, 0)
    is_text = spec[0] in "SU" and (alignment, flags) in ((1, 0), (4, 8)) and itemsize == _real_dtype(target).itemsize
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or more != [None] * 3 or not (is_number or is_text):
        raise pickle.UnpicklingError("a dtype with parts, or of another size")
    if units:  # of a date: a unit, how many of it, and numbers that are always 1
        ((metadata, (unit, *counts)),) = units
        is_known = metadata in (None, {}) and spec[0] in "mM" and type(unit) is bytes and _UNIT.fullmatch(unit)
        if not is_known or len(counts) != 3 or not all(type(each) is int and 0 < each < _MOST_UNITS for each in counts):
            raise pickle.UnpicklingError("a date without a unit")


def _check_elements(dtype: Any, data: Any, shape: Any) -> None:
    refuse_errors(dtype)
    if type(dtype) is not Call or dtype.name != DTYPE:
        raise pickle.UnpicklingError("an array without a dtype")
    if not dtype.is_users:
        real = _real_dtype(dtype)
        nbytes = math.prod(checked_shape(Size(shape))) * real.itemsize
        if type(data) not in (bytes, bytearray) or len(data) != nbytes:
            raise pickle.UnpicklingError("an array without the bytes of its elements")
        if data:
            check_printable(np.frombuffer(data, real))


def _real_dtype(call: Call) -> np.dtype[Any]:
    """The dtype of a call that was checked."""
    dtype: np.dtype[Any] = np.dtype(call.args[0], False, True)
    for _, (state,) in call.steps[-1:]:
        dtype.__setstate__(state)  # type: ignore[attr-defined]
    return dtype


def _numpy_dtype(spec: Any = None, align: Any = False, copy: Any = True, *, is_any: bool = False) -> Call:
    """``numpy.dtype`` of plain data, or of any where the user allowed it."""
    text = spec.decode("ascii") if isinstance(spec, bytes) else spec
    if isinstance(text, str) and _PLAIN_DTYPE.fullmatch(text):
        return Call(Global(DTYPE), (text,))
    if is_any:
        return Call(Global(DTYPE, users=np.dtype), (spec, align, copy))
    shown = text[:100] if isinstance(text, str) else type(text).__name__
    raise unsafe_error(f"numpy.dtype of {shown}: numbers, strings and dates only; add_safe_globals([numpy.dtype])")


def _numpy_array(cls: Any, shape: Any, dtype: Any) -> Call:
    """An array before its state."""
    refuse_errors(cls)
    if shape != (0,) or dtype not in ("b", b"b"):
        raise pickle.UnpicklingError("an array that has elements before its state")
    return Call(Global(ARRAY))


def _numpy_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Call:
    """An array in protocol 5."""
    _check_elements(dtype, data, shape)
    return Call(Global(BUFFER), (data, dtype, shape, "F" if order == "F" else "C"))


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    _check_elements(dtype, data, ())
    if dtype.is_users:
        return Call(Global(f"{MULTIARRAY}.scalar", users=np.float64(0).__reduce__()[0]), (dtype, data))
    return np.frombuffer(data, _real_dtype(dtype))[0]


def _of_python(name: str, *args: Any) -> Call:
    """An object of a class of Python's, whose arguments are small, and no containers."""
    refuse_errors(*args)
    for arg in args:
        is_text = type(arg) in (str, bytes) and len(arg) <= _LONGEST_TEXT
        is_text = is_text and (name != "fractions.Fraction" or _FRACTION.fullmatch(str(arg)) is not None)
        is_made = type(arg) is Call and arg.name in ("datetime.timedelta", "datetime.timezone")
        is_made = is_made or (type(arg) is Call and arg.is_users and name != "collections.deque")  # which walks through
        if not (is_text or is_made or type(arg) in _PARTS or (type(arg) is tuple and not arg)):
            raise unsafe_error(f"{name} of {described(arg)}")
    call = Call(Global(name), args)
    check_made(call)
    return call


def _layout(name: Any) -> Global:
    """With which torch pickles the layout of a tensor."""
    if type(name) is not str or name not in LAYOUTS:
        raise pickle.UnpicklingError(f"a layout that is none: {described(name)}")
    return Global(name)


def _typed(make: Callable[..., Any], *kinds: type | tuple[type, ...]) -> Callable[..., Any]:
    """A function whose arguments must be of these kinds."""

    def checked(*args: Any) -> Any:
        if len(args) > len(kinds):
            raise pickle.UnpicklingError(f"{len(args)} arguments, where there are at most {len(kinds)}")
        for arg, kind in zip(args, kinds, strict=False):
            if type(arg) not in (kind if isinstance(kind, tuple) else (kind,)):
                raise pickle.UnpicklingError(f"an argument of the wrong type: {described(arg)}")
        return make(*args)

    return checked


def _later(
    name: str, *kinds: type | tuple[type, ...], how: How = "call", check: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """What makes a call of a name on the list; ``check`` raises for arguments of these kinds that have no result."""

    def checked(*args: Any) -> Call:
        if check is not None:
            check(*args)
        return Call(Global(name), args, how)

    return _typed(checked, *kinds)


def _enum_member(enum: Any, name: Any) -> Call:
    """``getattr``, with which Python 3.11.0 to 3.11.3 (Debian 12's) pickle members of enums; only they may."""
    is_method = type(name) is str and (hasattr(IntEnum, name) or hasattr(str, name))
    if type(enum) is Global and type(name) is str and not name.startswith("_") and not is_method:
        is_users = isinstance(enum.users, type) and issubclass(enum.users, Enum)
        if enum.name == STAGE_ENUM and name not in STAGES and not is_users:
            raise pickle.UnpicklingError(f"a member that {enum} does not have: {described(name)}")
        if enum.name in _ENUMS or is_users:
            return Call(Global(enum.name, users=enum.users), (name,), "member")
    raise unsafe_error(f"builtins.getattr of {described(enum)}, {described(name)}")


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError(f"an OrderedDict of {described(items)}")
    if not items:  # as each tensor has
        return OrderedDict()
    checked_keys([key for key, _value in items])
    return OrderedDict(items)


def _byte_array(*args: Any) -> bytearray:
    """Of bytes and, of protocol 2, of a text in latin-1; an integer would be a size to allocate."""
    return bytearray(_encoded(*args)) if len(args) == 2 else _typed(bytearray, bytes)(*args)


def _encoded(text: Any, encoding: Any = "") -> bytes:
    """``codecs.encode``, with which protocols below 3 write bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"an encoding that is no writer's: {described(encoding)}")
    return text.encode("latin-1")
