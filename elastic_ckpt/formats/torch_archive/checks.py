"""What is made of the arguments and states that a pickle has for a name on the closed list, once they are checked."""

from __future__ import annotations

import argparse
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core.flat_ranges import checked_shape
from elastic_ckpt.formats.torch_archive.calls import (
    CALL,
    MEMBER,
    NEW,
    STATE,
    Call,
    Global,
    Size,
    Unmade,
    described,
    unsafe_error,
)
from elastic_ckpt.formats.torch_archive.keys import check_key

if TYPE_CHECKING:
    import numpy as np

ARRAY, BUFFER, DTYPE, NAMESPACE = "numpy.ndarray", "numpy.frombuffer", "numpy.dtype", "types.SimpleNamespace"
#: Classes whose state is a tuple: the attributes in it.
OF_TUPLES = dict.fromkeys(
    (
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    ),
    ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"),  # the last since torch 2.14
)
#: What Python's own classes are made of: long texts take long to become numbers, "1e999999999" an endless fraction.
_PARTS, _LONGEST_TEXT = frozenset({int, float, bool, bytes, type(None), Global}), 1 << 10
_LAYOUT = re.compile(r"torch\.(?:strided|jagged|_mkldnn|sparse_[a-z]{3})")
_FRACTION = re.compile(r"-?\d+(?:/\d+)?")
#: Numbers, strings of one length, dates and durations, and the units of these.
_PLAIN_DTYPE, _UNIT, _MOST_UNITS = (
    re.compile(r"[?biufc]\d{0,2}|[US]\d{1,6}|[mM]8"),
    re.compile(rb"[a-zA-Z]{1,7}"),
    1 << 30,
)


def set_state(target: Any, state: Any) -> None:
    """Give an object the state that a BUILD opcode has for it; :class:`pickle.UnpicklingError` for other objects."""
    kind = type(target)
    if kind is Unmade:
        return
    if kind is Call and (target.is_users or target.name in (ARRAY, DTYPE, NAMESPACE)):
        if not target.is_users:
            _CHECK_STATE[target.name](target, state)
        target.steps.append((STATE, [state]))
        return
    if kind is Call and target.name in OF_TUPLES and type(state) is tuple:
        state = dict(zip(OF_TUPLES[target.name], state, strict=False))
    is_known = kind in (argparse.Namespace, OrderedDict) or (kind is Call and target.how == NEW)
    if not is_known or type(state) is not dict or not all(is_attribute(key, kind) for key in state):
        raise pickle.UnpicklingError(
            f"an object of type {kind.__name__} is given a state, or no dictionary of attributes"
        )
    vars(target).update(state)


def is_attribute(key: Any, kind: type = argparse.Namespace) -> bool:
    """Whether a key of a state can be an attribute: none that Python or the class gives a meaning."""
    return type(key) is str and not key.startswith("__") and not hasattr(kind, key)


def _check_namespace(_target: Call, state: Any) -> None:
    if type(state) is not dict or not all(map(is_attribute, state)):
        raise pickle.UnpicklingError("a state of a namespace that is no dictionary of attributes")


def _check_dtype(target: Call, state: Any) -> None:
    """The state of a plain dtype: numpy's own ``__setstate__`` does not check a hostile one."""
    version, order, *more, itemsize, alignment, flags = state[:8]
    spec, units = target.args[0], state[8:]
    is_number = (itemsize, alignment, flags) == (-1, -1, 0)
    is_text = spec[0] in "SU" and (alignment, flags) in ((1, 0), (4, 8)) and itemsize == real_dtype(target).itemsize
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or more != [None] * 3 or not (is_number or is_text):
        raise pickle.UnpicklingError("a dtype with parts, or of another size")
    if units:  # of a date: a unit, how many of it, and numbers that are always 1
        ((metadata, (unit, *counts)),) = units
        is_known = metadata in (None, {}) and spec[0] in "mM" and type(unit) is bytes and _UNIT.fullmatch(unit)
        if not is_known or len(counts) != 3 or not all(type(each) is int and 0 < each < _MOST_UNITS for each in counts):
            raise pickle.UnpicklingError("a date without a unit")


def _check_array(_target: Call, state: Any) -> None:
    _version, shape, dtype, _is_fortran, data = state
    _check_elements(dtype, data, shape)


_CHECK_STATE = {ARRAY: _check_array, DTYPE: _check_dtype, NAMESPACE: _check_namespace}


def _check_elements(dtype: Any, data: Any, shape: Any) -> None:
    if type(dtype) is Unmade:
        raise dtype.error
    if type(dtype) is not Call or dtype.name != DTYPE:
        raise pickle.UnpicklingError("an array without a dtype")
    if not dtype.is_users:
        nbytes = math.prod(checked_shape(Size(shape))) * real_dtype(dtype).itemsize
        if type(data) not in (bytes, bytearray) or len(data) != nbytes:
            raise pickle.UnpicklingError("an array without the bytes of its elements")


def real_dtype(call: Call) -> np.dtype[Any]:
    """The dtype of a call that was checked."""
    import numpy as np  # noqa: PLC0415  few files need it

    dtype: np.dtype[Any] = np.dtype(call.args[0], False, True)
    for _, (state,) in call.steps[-1:]:
        dtype.__setstate__(state)  # type: ignore[attr-defined]
    return dtype


def numpy_dtype(spec: Any = None, align: Any = False, copy: Any = True) -> Call:
    """``numpy.dtype`` of plain data."""
    text = spec.decode("ascii") if isinstance(spec, bytes) else spec
    if isinstance(text, str) and _PLAIN_DTYPE.fullmatch(text):
        return Call(Global(DTYPE), (text,))
    shown = text[:100] if isinstance(text, str) else type(text).__name__
    raise unsafe_error(f"numpy.dtype of {shown}: numbers, strings and dates only; add_safe_globals([numpy.dtype])")


def any_dtype(spec: Any = None, align: Any = False, copy: Any = True) -> Call:
    """``numpy.dtype`` where the user allowed it."""
    import numpy as np  # noqa: PLC0415  few files need it

    is_plain = isinstance(spec, str) and _PLAIN_DTYPE.fullmatch(spec)
    return numpy_dtype(spec) if is_plain else Call(Global(DTYPE, users=np.dtype), (spec, align, copy))


def numpy_array(cls: Any, shape: Any, dtype: Any) -> Call:
    """An array before its state."""
    if type(cls) is Global and cls.error is not None:
        raise cls.error
    if shape != (0,) or dtype not in ("b", b"b"):
        raise pickle.UnpicklingError("an array that has elements before its state")
    return Call(Global(ARRAY))


def numpy_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Call:
    """An array in protocol 5."""
    _check_elements(dtype, data, shape)
    return Call(Global(BUFFER), (data, dtype, shape, "F" if order == "F" else "C"))


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """``numpy.core.multiarray.scalar``."""
    import numpy as np  # noqa: PLC0415  few files need it

    _check_elements(dtype, data, ())
    if dtype.is_users:
        return Call(Global("numpy.scalar", users=np.float64(0).__reduce__()[0]), (dtype, data))
    return np.frombuffer(data, real_dtype(dtype))[0]


def of_python(name: str, *args: Any) -> Call:
    """An object of a class of Python's, whose arguments are small, and no containers."""
    for arg in args:
        if type(arg) is Unmade:
            raise arg.error
        is_text = type(arg) is str and len(arg) <= _LONGEST_TEXT
        is_text = is_text and (name != "fractions.Fraction" or _FRACTION.fullmatch(arg) is not None)
        is_made = type(arg) is Call and (arg.is_users or arg.name in ("datetime.timedelta", "datetime.timezone"))
        if not (is_text or is_made or type(arg) in _PARTS or (type(arg) is tuple and not arg)):
            raise unsafe_error(f"{name} of {described(arg)}")
    return Call(Global(name), args)


def later(name: str, *args: Any, how: str = CALL) -> Call:
    """An object of a name on the list."""
    return Call(Global(name), args, how)


def layout(name: Any) -> Global:
    """``torch.serialization._get_layout``, with which torch pickles the layout of a tensor."""
    if type(name) is not str or not _LAYOUT.fullmatch(name):
        raise pickle.UnpicklingError(f"a layout that is none: {described(name)}")
    return Global(name)


def typed(make: Callable[..., Any], *kinds: type | tuple[type, ...], is_repeated: bool = False) -> Callable[..., Any]:
    """A function whose arguments must be of these kinds, or of the first, however many there are."""

    def checked(*args: Any) -> Any:
        expected = kinds * len(args) if is_repeated else kinds
        for arg, kind in zip(args, expected, strict=False):
            if type(arg) not in (kind if isinstance(kind, tuple) else (kind,)):
                raise pickle.UnpicklingError(f"an argument of the wrong type: {described(arg)}")
        if len(args) > len(expected):
            raise pickle.UnpicklingError(f"{len(args)} arguments, where there are at most {len(expected)}")
        return make(*args)

    return checked


def enum_member(enums: tuple[str, ...], enum: Any, name: Any) -> Call:
    """``getattr``, with which Python 3.11.0 to 3.11.3 (Debian 12's) pickle members of enums; only they may."""
    if type(enum) is Global and type(name) is str and not name.startswith("_"):
        is_users = isinstance(enum.users, type) and issubclass(enum.users, Enum)
        if enum.name in enums or is_users:
            return Call(Global(enum.name, users=enum.users), (name,), MEMBER)
    raise unsafe_error(f"builtins.getattr of {described(enum)}, {described(name)}")


def ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    new: OrderedDict[Any, Any] = OrderedDict()
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError(f"an OrderedDict of {described(items)}")
    for key, value in items:
        check_key(key, len(new))
        new[key] = value
    return new


def byte_array(*args: Any) -> bytearray:
    """Of bytes and, of protocol 2, of a text in latin-1; an integer would be a size to allocate."""
    return bytearray(encoded(*args)) if len(args) == 2 else typed(bytearray, bytes)(*args)


def encoded(text: Any, encoding: Any = "") -> bytes:
    """``codecs.encode``, with which protocols below 3 write bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"an encoding that is no writer's: {described(encoding)}")
    return text.encode("latin-1")
