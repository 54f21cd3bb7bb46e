"""Refuses bytes in what modules keep beside parameters and buffers (``get_extra_state``).

A module's ``set_extra_state`` may unpickle them with all that a pickle may do: Transformer Engine's does, of an
``io.BytesIO``, and of a tensor of any dtype, by its bytes (its ``module/base.py``). So bytes, and tensors of bytes, of
a file that is not trusted are given to no module. Nor are other tensors that are an entry by themselves, where an
unpickler would do more with their bytes than begin a few constants and fail.
"""

from __future__ import annotations

import io
import pickletools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.errors import Remedy, UnsafePickleError

_BYTES = (bytes, bytearray, memoryview, io.BytesIO)
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
#: Opcodes that push a constant on the stack.
_PUSHES = frozenset(
    {
        *("MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"),
        *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "LONG4", "EXT1", "EXT2", "EXT4"),
        *("SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "INT", "LONG", "FLOAT", "STRING", "UNICODE"),
    }
)
#: Those that leave the stack as it is.
_HEADERS = frozenset({"PROTO", "FRAME"})
#: Those that fail where nothing was memoized, and where no buffers nor ``persistent_load`` are given.
_FAILS = frozenset({"GET", "BINGET", "LONG_BINGET", "PERSID", "BINPERSID", "NEXT_BUFFER"})
#: Those that import what the lines behind them name.
_IMPORTS = frozenset({"GLOBAL", "INST"})
#: Opcodes that are looked at: bytes of numbers hardly ever begin with so many.
_MOST_OPCODES = 1 << 10
#: Bytes of the length that comes before an argument, by what pickletools says of it.
_LENGTH_NBYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def refuse_packed(path: str, entries: Mapping[Any, Any]) -> None:
    """Raise :class:`UnsafePickleError` for the first entry of extra state that has bytes.

    Args:
        path: of the file.
        entries: of a state dict, as this package's reader has made them.
    """
    for name, value in entries.items():
        if isinstance(name, str) and is_extra_state(name) and has_bytes(value):
            problem = "the extra state of a module (get_extra_state) has bytes, which the module may unpickle"
            expected = "tensors, numbers, texts and containers of them, which no module takes for a pickle"
            trusted = Remedy(when="if you trust whoever wrote the file", config={"trust_pickle": True})
            dtype = getattr(value, "dtype", None)
            found = type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype} that may be a pickle"
            raise UnsafePickleError(problem, path, expected, found, parameter=name, remedy=trusted)


def has_bytes(value: Any) -> bool:
    """Whether a value is or contains bytes, or is itself an array or a tensor that an unpickler may take for them."""
    import torch  # noqa: PLC0415  who makes values has it

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            return False  # of these, none has bytes for numpy
        is_of_bytes = value.dtype in (torch.uint8, torch.int8) and value.numel() > 0
        return is_of_bytes or may_be_pickle(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        is_of_bytes = value.dtype.kind in "SVO" or value.dtype.itemsize == 1
        return (is_of_bytes and value.size > 0) or may_be_pickle(value.tobytes())
    seen: set[int] = set()
    rest = [value]
    while rest:
        node = rest.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, (*_BYTES, torch.UntypedStorage, torch.TypedStorage)):
            return True
        rest += _parts_of(node)
    return False


def may_be_pickle(data: bytes) -> bool:
    """Whether CPython's unpickler may do more with these bytes than push constants, until it fails.

    It fails at a byte that is no opcode, where an argument is cut short, and where an opcode takes from an empty stack.
    Bytes of numbers mostly end so; whatever is not known to is taken for a pickle.
    """
    position = 0
    has_pushed = False
    for _ in range(_MOST_OPCODES):
        if position >= len(data):
            return False
        opcode = _OPCODES.get(data[position])
        if opcode is None or opcode.name in _FAILS:
            return False
        if opcode.name in _IMPORTS:
            return data.find(b"\n", position) >= 0
        if opcode.name not in _PUSHES | _HEADERS:
            return has_pushed  # it takes from the stack, or ends
        has_pushed = has_pushed or opcode.name in _PUSHES
        position = _behind_argument(data, position + 1, opcode)
    return True


def _behind_argument(data: bytes, start: int, opcode: pickletools.OpcodeInfo) -> int:
    """Where the argument of an opcode ends, which begins at ``start``."""
    if opcode.arg is None:
        return start
    if opcode.arg.n == pickletools.UP_TO_NEWLINE:
        end = data.find(b"\n", start)
        return len(data) if end < 0 else end + 1
    if opcode.arg.n >= 0:
        return start + opcode.arg.n
    behind_length = start + _LENGTH_NBYTES[opcode.arg.n]
    return behind_length + int.from_bytes(data[start:behind_length], "little")


def _parts_of(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset, deque)):
        return node
    return list(getattr(node, "__dict__", {}).values())
