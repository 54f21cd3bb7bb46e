"""Closed sets of what torch and Python know by name or by number, so that what is read here can be made anywhere.

A name that only looks like one of torch's, a number that no member of an enum has, or a duration beyond what Python
counts is refused where a file is read, and not by the loader that gets the object. torch's are those of 2.4 to 2.13.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pickle
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import Remedy, UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global, described

_SUB_BYTE = ("float4_e2m1fn_x2", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
#: Dtypes, also those whose tensors cannot be read.
DTYPES = frozenset(map("torch.{}".format, (*ITEMSIZE, *_SUB_BYTE, *_INTEGERS, "qint8", "quint8", "qint32")))
#: How a quantized tensor's integers stand for numbers.
QSCHEMES = frozenset(
    (
        *("torch.per_tensor_affine", "torch.per_tensor_symmetric", "torch.per_channel_affine"),
        *("torch.per_channel_symmetric", "torch.per_channel_affine_float_qparams"),
    )
)
LAYOUTS = frozenset(
    (
        *("torch.strided", "torch.jagged", "torch._mkldnn"),
        *(f"torch.sparse_{kind}" for kind in ("coo", "csr", "csc", "bsr", "bsc")),
    )
)
#: torch's own devices, and names that backends outside it give to ``privateuseone``.
_DEVICES = frozenset(
    (
        *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla"),
        *("lazy", "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone"),
        *("npu", "mlu", "musa", "gcu", "sdaa", "cnnl", "supa", "dipu", "neuron"),
    )
)
_DEVICE = re.compile(r"([a-z]+)(?::(0|[1-9]\d{0,2}))?")
_MOST_DEVICES = 128
#: Greatest value of each enum's members; those of Megatron, which differ by version, are few. The least is 1, or 0.
STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
_MOST_MEMBERS = {STAGE_ENUM: 3, "_MEM_FORMAT_ENCODING": 3, "MEM_FORMAT_ENCODING": 3, "WriteItemType": 3}
_MOST_OF_OTHERS = 64
_LONGEST_MEMBER = 64
#: Python's classes of :data:`elastic_ckpt.formats.torch_archive.globals.PLAIN_CLASSES`.
_CLASSES: dict[str, Callable[..., Any]] = {
    **{"collections.deque": deque, "collections.defaultdict": defaultdict, "types.SimpleNamespace": SimpleNamespace},
    **{"builtins.slice": slice, "builtins.range": range},
    **{
        f"datetime.{cls.__name__}": cls
        for cls in (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
    },
    **{"decimal.Decimal": decimal.Decimal, "fractions.Fraction": fractions.Fraction},
}


def check_device(kind: str, index: int | None = None) -> None:
    """Raise :class:`pickle.UnpicklingError` for what is no device anywhere.

    One of a backend that is not known here may be one elsewhere: :class:`UnsupportedError`.
    """
    match = _DEVICE.fullmatch(kind)
    number = index if match is None or match[2] is None else int(match[2])
    is_named_twice = match is not None and match[2] is not None and index is not None
    is_index = number is None or 0 <= number < _MOST_DEVICES
    if match is None or is_named_twice or not is_index:
        raise pickle.UnpicklingError(f"a device that is none: {described(kind)}")
    if match[1] not in _DEVICES:
        problem = "this file names a device of a backend that elastic_ckpt does not know"
        when = "if you trust whoever wrote the file, and torch knows the backend here"
        trusted = Remedy(when=when, config={"trust_pickle": True})
        raise UnsupportedError(problem, expected="a device of torch's", found=kind[:100], remedy=trusted)


def check_member(enum: str, value: int | str) -> None:
    """Raise :class:`pickle.UnpicklingError` for what cannot be a member of one of the listed enums, by its value."""
    name = enum if enum == STAGE_ENUM else enum.rpartition(".")[2]
    most = _MOST_MEMBERS.get(name)
    if isinstance(value, str):
        is_member = most is None and len(value) <= _LONGEST_MEMBER
    else:
        is_member = 0 <= value <= (_MOST_OF_OTHERS if most is None else most)
    if not is_member:
        raise pickle.UnpicklingError(f"a value that no member of {enum} has: {str(value)[:40]}")


def check_made(call: Call) -> None:
    """Raise :class:`pickle.UnpicklingError` for an object of Python's that its class refuses to make.

    Its arguments are known to be small. One with an argument of a class of the user's is made where it is wanted.
    """
    try:
        _made(call)
    except _OfTheUser:
        return
    except Exception as error:  # constructors can raise anything
        raise pickle.UnpicklingError(f"a {call.name} that cannot be: {type(error).__name__}") from error


class _OfTheUser(Exception):
    """An argument that is not made here."""


def _made(value: Any) -> Any:
    if type(value) is Global:
        if value.users is not None:
            raise _OfTheUser
        return list  # a factory, which is not called
    if type(value) is not Call:
        return value
    if value.is_users or value.name not in _CLASSES or value.steps:
        raise _OfTheUser
    return _CLASSES[value.name](*map(_made, value.args))


def check_printable(array: np.ndarray[Any, Any]) -> None:
    """Raise an error for elements of an array, or of its fields, that numpy itself can neither print nor compare."""
    dtype = array.dtype
    if dtype.names:
        for name in dtype.names:
            check_printable(array[name])
    elif dtype.kind == "U" and array.size:
        points = np.ascontiguousarray(array).reshape(-1).view(np.dtype("u4").newbyteorder(dtype.byteorder))
        if points.size and points.max() > sys.maxunicode:
            raise pickle.UnpicklingError(f"a text of numpy's with the code point {points.max():#x}")
    elif dtype.kind == "M" and np.datetime_data(dtype)[0] == "generic" and not np.isnat(array).all():
        remedy = Remedy("save it as numbers, or with a unit")
        raise UnsupportedError("this file has a date of numpy's without a unit", found=str(dtype), remedy=remedy)
