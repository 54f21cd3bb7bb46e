"""The closed list of names that a checkpoint's pickles may use, and what takes the place of each.

torch's own names since 1.6 (``torch/_utils.py``, ``torch/_tensor.py``, ``torch/storage.py``), containers and numbers of
Python, arrays of numpy 1 and 2, and the small classes that DeepSpeed, Megatron and ``torch.distributed.checkpoint``
pickle, under every module path that they had. None of them runs code of the file's choosing. Others are named, and
called by nobody here, if the user passed them to :func:`torch.serialization.add_safe_globals`, or trusts the pickle.
"""

from __future__ import annotations

import argparse
import importlib
import operator
import pathlib
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from typing import Any

from elastic_ckpt.core.shapes import checked_shape
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import (
    PLAIN_CLASSES,
    STATE,
    Call,
    Global,
    Unmade,
    described,
    unsafe_error,
)
from elastic_ckpt.formats.torch_archive.keys import check_key, checked_keys
from elastic_ckpt.formats.torch_archive.stand_ins import (
    ArrayStandIn,
    DtypeStandIn,
    Size,
    StandIn,
    dtype_stand_in,
    numpy_array,
    numpy_scalar,
)
from elastic_ckpt.formats.torch_archive.tensors import REBUILD, subclass_error

#: What torch itself adds to the list of whoever imports it, and what starts to talk to other ranks where it is called.
_COLLECTIVE = frozenset({"torch.distributed.device_mesh.DeviceMesh", "torch.distributed.device_mesh.init_device_mesh"})
#: Modules whose names are refused even where the user allowed one, as torch does.
_BLOCKED = frozenset({"sys", "os", "posix", "nt"})
_DCP = "torch.distributed.checkpoint"
_ENUMS_OF_MEGATRON = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType", "AttnBackend")
_MODULES_OF_MEGATRON = ("enums", "model.enums", "core.enums", "core.transformer.enums")
#: Enums and classes with plain data, under every module path that they had.
_ENUMS = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
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
#: What Python's own classes are made of: long texts take long to become numbers, "1e999999999" an endless fraction.
_PARTS, _LONGEST_TEXT = frozenset({int, float, bool, bytes, type(None), Global}), 1 << 10
_FRACTION = re.compile(r"-?\d+(?:/\d+)?")
#: Dtypes, also those whose tensors cannot be read, and how integers stand for the numbers of a quantized tensor.
_OF_TORCH = re.compile(r"torch\.(?:bool|(?:q?u?int|bits|b?float|complex)\d\w{,30}|per_(?:tensor|channel)_\w{,30})")
#: Classes whose state is a tuple: the attributes in it.
_OF_TUPLES = dict.fromkeys(
    (f"{_DCP}.metadata.TensorProperties", "torch.distributed._shard.sharded_tensor.metadata.TensorProperties"),
    ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"),  # the last since torch 2.14
)


def find_global(module: str, name: str) -> Global:
    """The entry of a name. One that is not on the list, and that the user did not allow, has an error."""
    path = f"{module}.{name}"
    entry = _closed_list().get(path)
    if path == "numpy.dtype" and path in _users_globals():
        return Global(path, partial(dtype_stand_in, True))
    if entry is not None:
        return entry
    if is_storage(module, name) or _OF_TORCH.fullmatch(path):
        return Global(path)
    if module not in _BLOCKED and path not in _COLLECTIVE and path in (users := _users_globals()):
        return Global(path, users=users[path])
    is_torchao = module.partition(".")[0] == "torchao"
    return Global(path, error=subclass_error(path) if is_torchao else unsafe_error(path))


def find_trusted(module: str, name: str) -> Global:
    """The entry of a name in a trusted pickle, which is imported if it is not on the list."""
    path = f"{module}.{name}"
    if path == "numpy.dtype":
        return Global(path, partial(dtype_stand_in, True))
    entry = find_global(module, name)
    if entry.error is None and path != "builtins.getattr":
        return entry
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        return Global(path, error=import_error(path, error))
    return Global(path, users=found)


def import_error(path: str, error: Exception) -> UnsupportedError:
    """A class or function that is not there."""
    return UnsupportedError(
        "this file holds an object of a class that cannot be imported here",
        found=f"{path}: {error}"[:300],
        remedy="install its package, or import the module that has it before loading",
    )


def is_storage(module: str, name: str) -> bool:
    """Whether a name is of a class of storages, of whatever device."""
    return module.partition(".")[0] == "torch" and name.endswith("Storage")


def set_state(target: Any, state: Any) -> None:
    """Give an object the state that a BUILD opcode has for it; :class:`pickle.UnpicklingError` for other objects."""
    kind = type(target)
    if kind is StandIn and type(state) is tuple and target.name in _OF_TUPLES:
        state = dict(zip(_OF_TUPLES[target.name], state, strict=False))
    if kind in (Call, Unmade):
        _keep_state(target, state)
    elif kind in (DtypeStandIn, ArrayStandIn):
        target.set_state(state)
    elif kind in (argparse.Namespace, StandIn, OrderedDict):
        if type(state) is not dict or not all(is_attribute(key, kind) for key in state):
            raise pickle.UnpicklingError(f"a state of {kind.__name__} that is no dictionary of attributes")
        vars(target).update(state)
    else:
        raise pickle.UnpicklingError(f"an object of type {kind.__name__} is given a state")


def is_attribute(key: Any, kind: type = argparse.Namespace) -> bool:
    """Whether a key of a state can be an attribute: none that Python or the class gives a meaning."""
    return type(key) is str and not key.startswith("__") and not hasattr(kind, key)


def _keep_state(target: Call | Unmade, state: Any) -> None:
    """The state of an object that is made later, or never; of Python's own classes, only namespaces have one."""
    if isinstance(target, Unmade):
        return
    if type(target.function) is Global and target.function.users is None:
        is_namespace = target.function.name == "types.SimpleNamespace" and type(state) is dict
        if not is_namespace or not all(map(is_attribute, state)):
            raise pickle.UnpicklingError(f"an object of type {target.function} is given a state")
    target.steps.append((STATE, [state]))


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
        "argparse.Namespace": _namespace,
        "collections.OrderedDict": _ordered_dict,
        "collections.Counter": _counter,
        "builtins.set": lambda items=(): set(checked_keys(items)),
        "builtins.frozenset": lambda items=(): frozenset(checked_keys(items)),
        "builtins.complex": _complex,
        "builtins.bytearray": _bytearray,
        "builtins.bytes": _bytes,
        "builtins.getattr": _enum_member,
        **dict.fromkeys(map("builtins.{}".format, ("object", "list", "dict", "tuple", "str", "int", "float", "bool"))),
        "_codecs.encode": _encode,
        "copyreg._reconstructor": _reconstruct,
        "torch.Size": Size,
        "torch.Tensor": None,
        "torch.nn.parameter.Parameter": None,
        "numpy.dtype": partial(dtype_stand_in, False),
        "numpy.ndarray": None,
        **REBUILD,
    }
    for module in ("pathlib", "pathlib._local"):  # the second is Python 3.13's
        calls |= {f"{module}.{cls.__name__}": partial(_path, cls) for cls in (pathlib.PosixPath, pathlib.PurePosixPath)}
    for core in ("numpy._core", "numpy.core"):  # of numpy 2, and of older ones
        calls |= {
            f"{core}.multiarray._reconstruct": _empty_array,
            f"{core}.multiarray.scalar": numpy_scalar,
            f"{core}.numeric._frombuffer": _from_buffer,
        }
    calls |= {path: partial(_stand_in, path) for path in (*_CLASSES, *_OF_TUPLES)}
    calls |= {path: partial(_member, path) for path in _ENUMS}
    calls |= {path: partial(_later, path) for path in PLAIN_CLASSES}
    calls |= {"torch.device": _device, "torch.serialization._get_layout": _layout}
    return {path: Global(path, call, copies=path not in REBUILD) for path, call in calls.items()}


def _later(name: str, *args: Any) -> Call:
    """An object of a class of Python's, whose arguments are small, and no containers."""
    for arg in args:
        if type(arg) is Unmade:
            raise arg.error
        is_text = type(arg) is str and len(arg) <= _LONGEST_TEXT
        is_text = is_text and (name != "fractions.Fraction" or _FRACTION.fullmatch(arg) is not None)
        is_users = type(arg) is Call and (type(arg.function) is Call or arg.function.users is not None)
        is_duration = type(arg) is Call and str(arg) in ("datetime.timedelta", "datetime.timezone")
        if not (is_text or is_users or is_duration or type(arg) in _PARTS or (type(arg) is tuple and not arg)):
            raise unsafe_error(f"{name} of {described(arg)}")
    return Call(Global(name), args)


def _stand_in(name: str) -> StandIn:
    """An object before its state; none of the classes is pickled with arguments."""
    return StandIn(name)


def _member(enum: str, value: Any) -> StandIn:
    if type(value) not in (int, str):
        raise pickle.UnpicklingError(f"a member of {enum} of {described(value)}")
    return StandIn(enum, (value,))


def _device(kind: Any, index: Any = None) -> StandIn:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise pickle.UnpicklingError("a device without a type and an index")
    return StandIn("torch.device", (kind,) if index is None else (kind, index))


def _layout(name: Any) -> StandIn:
    """With which torch pickles the layout of a tensor."""
    if type(name) is not str:
        raise pickle.UnpicklingError("a layout without a name")
    return StandIn("torch.layout", (name,))


def _namespace() -> argparse.Namespace:
    return argparse.Namespace()


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    new: OrderedDict[Any, Any] = OrderedDict()
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError(f"an OrderedDict of {described(items)}")
    for key, value in items:
        check_key(key, len(new))
        new[key] = value
    return new


def _counter(counts: Any = ()) -> Counter[Any]:
    if type(counts) is not dict and counts != ():
        raise pickle.UnpicklingError("a Counter of something that is no dictionary")
    new: Counter[Any] = Counter()
    new.update(dict(counts))
    return new


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise pickle.UnpicklingError("a complex number that is no pair of floats")
    return complex(real, imaginary)


def _bytearray(*args: Any) -> bytearray:
    """``bytearray()``, ``bytearray(bytes)`` and, of protocol 2, ``bytearray(str, "latin-1")``."""
    if len(args) == 2:
        return bytearray(_encode(*args))
    if args and type(args[0]) is not bytes:  # an integer would be a size to allocate
        raise pickle.UnpicklingError("a bytearray of something that is no bytes")
    return bytearray(*args)


def _bytes(*args: Any) -> bytes:
    if args:  # only empty ones are pickled so, in protocols below 3
        raise pickle.UnpicklingError("bytes of something else")
    return b""


def _encode(text: Any, encoding: Any = "") -> bytes:
    """``codecs.encode``, with which protocols below 3 write bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"an encoding that is no writer's: {described(encoding)}")
    return text.encode("latin-1")


def _reconstruct(cls: Any, base: Any, state: Any) -> Any:
    """``copyreg._reconstructor``, with which protocols below 2 write objects."""
    if type(cls) is not Global or type(base) is not Global or base.name != "builtins.object":
        raise pickle.UnpicklingError("an object that is made from another kind than object")
    if cls.users is not None:
        return Call(cls, (), is_new=True)
    if cls.call is None:
        raise cls.error or unsafe_error(cls.name)
    return cls.call()


def _enum_member(enum: Any, name: Any) -> Any:
    """``getattr``, with which Python 3.11.0 to 3.11.3 (Debian 12's) pickle members of enums; only they may."""
    if type(enum) is Global and type(name) is str and not name.startswith("_"):
        if enum.name in _ENUMS:
            return StandIn(enum.name, (name,), is_by_name=True)
        if isinstance(enum.users, type) and issubclass(enum.users, Enum):
            return Call(Global("builtins.getattr", users=operator.getitem), (enum, name))
    raise unsafe_error(f"builtins.getattr of {described(enum)}, {described(name)}")


def _path(cls: type[pathlib.PurePath], *parts: Any) -> pathlib.PurePath:
    """A path: made from strings alone, without touching a file."""
    if not all(type(part) is str for part in parts):
        raise pickle.UnpicklingError("a path of something else than strings")
    return cls(*parts)


def _empty_array(cls: Any, shape: Any, dtype: Any) -> ArrayStandIn:
    if type(cls) is Global and cls.error is not None:
        raise cls.error
    if shape != (0,) or dtype not in ("b", b"b"):
        raise pickle.UnpicklingError("an array that has elements before its state")
    return ArrayStandIn()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """numpy's arrays in protocol 5."""
    return numpy_array(dtype, data, checked_shape(Size(shape))).reshape(shape, order="F" if order == "F" else "C")
