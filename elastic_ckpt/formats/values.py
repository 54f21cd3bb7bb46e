"""Reads small tensors of a file as numbers, and the hyperparameters of param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from elastic_ckpt.core.metadata import ITEMSIZE, is_floating
from elastic_ckpt.core.values import LeftInFile, TensorValue, is_number
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.calls import Call, Global, Size
from elastic_ckpt.formats.torch_archive.charges import PAIR_NBYTES
from elastic_ckpt.formats.torch_archive.globals import ARRAY, BUFFER, DTYPE, PLAIN_CLASSES
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, TensorRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves

#: Tensors may be larger than their file by this factor: views share their storage, copies do not.
_MOST_COPIES = 4
#: And by this many bytes.
_MOST_MORE_NBYTES = 1 << 20
#: Bytes between the elements of a tensor that are read along with them: so many times theirs.
_MOST_GAPS = 2
#: Or so many.
_MOST_GAPS_NBYTES = 4096
#: Elements of a tensor among hyperparameters that is read: a file may name one tensor very often.
_MOST_ELEMENTS = 16
#: Objects that are made where they are a hyperparameter themselves.
_MADE = frozenset((*PLAIN_CLASSES, ARRAY, BUFFER, DTYPE))


def read_bytes(file: PickledFile, refs: Iterable[TensorRef]) -> list[bytes]:
    """The elements of each tensor in row-major order; :class:`DamagedError` if the file has shrunk."""
    read: dict[TensorRef, bytes] = {}  # a file may name one tensor very often
    found = list[bytes]()
    with file.kept_open():
        for ref in refs:
            if ref not in read:
                read[ref] = _elements(file, ref)
            found.append(read[ref])
    return found


def _elements(file: PickledFile, ref: TensorRef) -> bytes:
    itemsize = ITEMSIZE[ref.dtype]
    most_nbytes = _MOST_COPIES * file.nbytes + _MOST_MORE_NBYTES
    if ref.numel * itemsize > most_nbytes:  # strides of 0 repeat elements without end
        problem = "this file holds tensors that share their elements, and are many times larger than the file"
        expected = f"at most {most_nbytes} bytes, {_MOST_COPIES} times the file's size and a bit more"
        remedy = "leave such tensors out of the client state, or save copies of them"
        found = f"{ref.numel} elements of {ref.reach * itemsize} bytes"
        raise UnsupportedError(problem, file.path, expected, found, remedy=remedy)
    if ref.is_contiguous:
        raw = bytearray(ref.numel * itemsize)
        file.read_into(ref.byte_offset, memoryview(raw))
        return bytes(raw)
    file.budget.charge_nbytes(ref.numel * itemsize)
    elements = np.empty(ref.shape, f"V{itemsize}")
    _read_strided(file, ref.byte_offset, elements, tuple(stride * itemsize for stride in ref.stride))
    return elements.tobytes()


def _read_strided(file: PickledFile, byte_offset: int, target: np.ndarray[Any, Any], strides: tuple[int, ...]) -> None:
    """Fill an array with elements at strides in bytes: by one read, or where they are far apart, by index."""
    steps = [(size - 1) * stride for size, stride in zip(target.shape, strides, strict=True)]
    reach_nbytes = sum(steps) + target.itemsize
    if reach_nbytes <= max(_MOST_GAPS * target.nbytes, _MOST_GAPS_NBYTES):
        raw = bytearray(reach_nbytes)
        file.read_into(byte_offset, memoryview(raw))
        target[...] = np.ndarray(target.shape, target.dtype, raw, strides=strides)
        return
    longest = steps.index(max(steps))
    inside = strides[:longest] + strides[longest + 1 :]
    for index, part in enumerate(np.moveaxis(target, longest, 0)[..., None]):  # of no dimension, still an array
        _read_strided(file, byte_offset + index * strides[longest], part[..., 0], inside)


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
        large = _large_integer(value)
        if large is not None:
            return LeftInFile(f"an integer of {large.bit_length()} bits")
        is_made = isinstance(value, Call) and (value.is_users or value.name in _MADE)
        return _number_or_left(materialise(file, value)) if is_made else replace_leaves(value, real, charge=file.charge)

    file.charge(len(group), PAIR_NBYTES * len(group))
    is_device = {key for key, value in group.items() if isinstance(value, Call) and value.name == "torch.device"}
    with file.kept_open():
        return {key: plain(value) for key, value in group.items() if key not in is_device}


def _large_integer(value: Any) -> int | None:
    """An integer beyond 64 bits in a value: it cannot be compared with other numbers, and one of 15,000 not printed."""
    waiting = [value]
    seen = {id(value)}
    while waiting:
        each = waiting.pop()
        if isinstance(each, int) and not is_number(each):
            return each
        inner = [*each.values()] if isinstance(each, Mapping) else each if isinstance(each, (list, tuple)) else ()
        for one in inner:
            if id(one) not in seen:
                seen.add(id(one))
                waiting.append(one)
    return None


def _number_or_left(value: Any) -> Any:
    if isinstance(value, (type, Call)) or not hasattr(value, "__array__"):
        return value
    return LeftInFile(repr(value)[:200]) if value.shape else value.item()


def _named(file: PickledFile, leaf: Size | Global | Call) -> Any:
    """The size, dtype or enum member that a leaf stands for; other objects differ from their equals of other files."""
    try:
        found = materialise(file, leaf)
    except ElasticCkptError:  # of another version; refused by its name, and only where it is restored
        file.budget.refuse_if_used_up()
        found = None
    is_read = isinstance(found, Enum) if isinstance(leaf, Call) else found is not None
    return found if is_read else LeftInFile(f"an object of {leaf}"[:200])


def plain_numbers(file: PickledFile, values: dict[str, Any]) -> dict[str, Any]:
    """A dictionary in which tensors of one element, without dimensions, are Python numbers."""
    points = {key: value for key, value in values.items() if isinstance(value, TensorRef) and not value.shape}
    read = zip(points, read_numbers(file, points.values()), strict=True)
    return {**values, **{key: number.item() for key, number in read}}
