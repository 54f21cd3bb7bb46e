"""Reads small tensors of a file as numbers, and the hyperparameters of param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from elastic_ckpt.core.metadata import ITEMSIZE, is_floating
from elastic_ckpt.core.values import LeftInFile, TensorValue
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile, read_into
from elastic_ckpt.formats.torch_archive.calls import Call, Global, Size
from elastic_ckpt.formats.torch_archive.globals import ARRAY, BUFFER, DTYPE, PLAIN_CLASSES
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, TensorRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves
from elastic_ckpt.storage import open_stream

#: Tensors may be larger than their file by this factor and this many bytes: views share their storage, copies do not.
_MOST_COPIES, _MOST_MORE_NBYTES = 4, 1 << 20
#: Elements of a tensor among hyperparameters that is read: a file may name one tensor very often.
_MOST_ELEMENTS = 16
#: Objects that are made where they are a hyperparameter themselves.
_MADE = frozenset((*PLAIN_CLASSES, ARRAY, BUFFER, DTYPE))


def read_bytes(file: PickledFile, refs: Iterable[TensorRef]) -> list[bytes]:
    """The elements of each tensor in row-major order; :class:`DamagedError` if the file has shrunk."""
    wanted, most_nbytes, read = list(refs), _MOST_COPIES * file.nbytes + _MOST_MORE_NBYTES, list[bytes]()
    if not wanted:
        return read  # as in most files: they need not be opened again
    with open_stream(file.path) as stream:
        for ref in wanted:
            itemsize = ITEMSIZE[ref.dtype]
            raw: bytes | bytearray = bytearray(ref.reach * itemsize)
            if ref.numel * itemsize > most_nbytes:  # strides of 0 repeat elements without end
                problem = "this file holds tensors that share their elements, and are many times larger than the file"
                expected = f"at most {most_nbytes} bytes, {_MOST_COPIES} times the file's size and a bit more"
                remedy = "leave such tensors out of the client state, or save copies of them"
                found = f"{ref.numel} elements of {len(raw)} bytes"
                raise UnsupportedError(problem, file.path, expected, found, remedy=remedy)
            read_into(file, stream, ref.byte_offset, memoryview(raw))
            if not ref.is_contiguous:
                strides = tuple(stride * itemsize for stride in ref.stride)
                raw = np.ndarray(ref.shape, f"V{itemsize}", raw, strides=strides).tobytes()
            read.append(bytes(raw))
    return read


def read_numbers(file: PickledFile, refs: Iterable[TensorRef]) -> list[np.ndarray[Any, Any]]:
    """The elements of each tensor, flat; bfloat16 as float32, and dtypes that numpy lacks as their bytes."""
    refs = list(refs)
    return [to_numbers(ref.dtype, raw) for ref, raw in zip(refs, read_bytes(file, refs), strict=True)]


def tensor_values(file: PickledFile, refs: Iterable[TensorRef]) -> list[TensorValue | None]:
    """Small tensors as plain values; ``None`` for dtypes that numpy lacks."""
    refs = list(refs)
    return [
        None if read.dtype.kind == "V" else TensorValue(ref.dtype, ref.shape, tuple(read.tolist()))
        for ref, read in zip(refs, read_numbers(file, refs), strict=True)
    ]


def to_numbers(dtype: str, raw: bytes | memoryview) -> np.ndarray[Any, Any]:
    """See :func:`read_numbers`."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    known = dtype not in ("complex32",) and not dtype.startswith("float8")
    return np.frombuffer(raw, dtype if known else f"V{ITEMSIZE[dtype]}")


def agrees_when_rounded(values: np.ndarray[Any, Any], rounded: np.ndarray[Any, Any], dtype: str) -> bool:
    """Whether the ``rounded`` numbers, which were of ``dtype``, are the values rounded to it, to nearest even.

    True for dtypes that are not floating-point ones of torch, whose rounding is not known here.
    """
    if not is_floating(dtype) or values.dtype.kind != "f":
        return True
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4").astype("<u8")
        even = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4")
        values = np.where(np.isnan(values), values, even)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(rounded.dtype), rounded, equal_nan=True))


def hyperparameters(file: PickledFile, group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a param group as the optimizer had them; small tensors are :class:`TensorValue`.

    In place of other tensors, arrays and objects there is :class:`LeftInFile`, which no load restores. Devices are left
    out: that of the rank that saved a file is not that of another one.
    """

    def real(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            read = tensor_values(file, [leaf])[0] if leaf.numel <= _MOST_ELEMENTS else None
            return LeftInFile(f"a tensor of torch.{leaf.dtype}, shape {leaf.shape}") if read is None else read
        if isinstance(leaf, StorageRef):
            return LeftInFile(f"a storage of {leaf.nbytes} bytes")
        return _named(file, leaf) if isinstance(leaf, (Size, Global, Call)) else _number_or_left(leaf)

    def plain(value: Any) -> Any:
        is_made = isinstance(value, Call) and (value.is_users or value.name in _MADE)
        return _number_or_left(materialise(file, value)) if is_made else replace_leaves(value, real)

    is_device = {key for key, value in group.items() if isinstance(value, Call) and value.name == "torch.device"}
    return {key: plain(value) for key, value in group.items() if key not in is_device}


def _number_or_left(value: Any) -> Any:
    if isinstance(value, (type, Call)) or not hasattr(value, "__array__"):
        return value
    return LeftInFile(repr(value)[:200]) if value.shape else value.item()


def _named(file: PickledFile, leaf: Size | Global | Call) -> Any:
    """The size, dtype or enum member that a leaf stands for; other objects differ from their equals of other files."""
    try:
        found = materialise(file, leaf)
    except ElasticCkptError:  # of another version; refused by its name, and only where it is restored
        found = None
    is_read = isinstance(found, Enum) if isinstance(leaf, Call) else found is not None
    return found if is_read else LeftInFile(f"an object of {leaf}"[:200])


def plain_numbers(file: PickledFile, values: dict[str, Any]) -> dict[str, Any]:
    """A dictionary in which tensors of one element, without dimensions, are Python numbers."""
    points = {key: value for key, value in values.items() if isinstance(value, TensorRef) and not value.shape}
    read = zip(points, read_numbers(file, points.values()), strict=True)
    return {**values, **{key: number.item() for key, number in read}}
