"""Interprets at once the thirty opcodes with which ``torch.save`` has a tensor rebuilt: most of a checkpoint's pickles.

A regular expression recognizes them, and what they do follows in the same order, with the same checks. What is not
exactly of this form is left to the opcodes one by one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

_GET, _PUT, _INTEGER = rb"(?:h.|j.{4})", rb"r(.{4})", rb"(?:K.|M.{2}|J.{4})"
_INTEGERS = rb"((?:K.|M.{2}|J.{4}){1,3}[\x85-\x87])"
#: Behind the MARK that begins the arguments: (("storage", type, key, location, numel), offset, size, stride,
#: requires_grad, OrderedDict()), up to the PUT behind REDUCE.
_OPCODES = re.compile(
    rb"\((" + _GET + rb")(" + _GET + rb")X(.)\0\0\0(\d+)" + _PUT
    + rb"(?:(" + _GET + rb")|X(.)\0\0\0([a-z]+:\d+)" + _PUT + rb")"
    + rb"(" + _INTEGER + rb")t" + _PUT + rb"Q(" + _INTEGER + rb")"
    + _INTEGERS + _PUT + _INTEGERS + _PUT
    + rb"([\x88\x89])(" + _GET + rb")\)R" + _PUT + rb"t" + _PUT + rb"R" + _PUT,
    re.DOTALL,
)  # fmt: skip
_INDICES = struct.Struct("<8I")
_TRUE, _TUPLE1, _SIGNED = b"\x88", 0x85, 0x4A


class _Operands(dict[bytes, int]):
    """The operands of opcodes that push a number, or get from the memo; each is computed once."""

    def __missing__(self, opcode: bytes) -> int:
        value = self[opcode] = int.from_bytes(opcode[1:], "little", signed=opcode[0] == _SIGNED)
        return value


class _Tuples(dict[bytes, "tuple[int, ...] | None"]):
    """The tuples that opcodes build; ``None`` for opcodes that take more or fewer items than they push."""

    def __missing__(self, opcodes: bytes) -> tuple[int, ...] | None:
        items = tuple(map(_Operands().__missing__, re.findall(_INTEGER, opcodes[:-1], re.DOTALL)))
        value = self[opcodes] = items if len(items) == opcodes[-1] - _TUPLE1 + 1 else None
        return value


def tensor_reader(
    data: bytes, memo: dict[int, Any], load: Callable[[Any], Any], call: Callable[[Any, Any], Any]
) -> Callable[[int, Any], tuple[Any, int] | None]:
    """A function of an offset, behind a MARK, and of the function below it.

    It returns the tensor and the offset behind it, or ``None`` where the opcodes are others; nothing is done then.
    """
    operands, tuples, recognize = _Operands(), _Tuples(), _OPCODES.match

    def read(at: int, function: Any) -> tuple[Any, int] | None:
        match = recognize(data, at)
        if match is None:
            return None
        tag, kind, width, key, put_key, place, place_width, place_text, put_place, numel, put_id, *rest = match.groups()
        offset, size, put_size, stride, put_stride, requires_grad, hooks, put_hooks, put_arguments, put = rest
        shape, steps = tuples[size], tuples[stride]
        if shape is None or steps is None or len(key) != width[0] or not (place or len(place_text) == place_width[0]):
            return None
        puts = put_key + (put_place or put_id) + put_id + put_size + put_stride + put_hooks + put_arguments + put
        indices = _INDICES.unpack(puts)
        if max(indices) > at:  # perhaps larger than the memo may be
            return None
        at_key, at_place, at_id, at_shape, at_steps, at_hooks, at_arguments, at_tensor = indices
        first, second = memo[operands[tag]], memo[operands[kind]]
        name = memo[at_key] = key.decode()
        if place:
            location = memo[operands[place]]
        else:
            location = memo[at_place] = place_text.decode()
        identity = memo[at_id] = first, second, name, location, operands[numel]
        storage = load(identity)
        memo[at_shape], memo[at_steps] = shape, steps
        empty = memo[at_hooks] = call(memo[operands[hooks]], ())
        arguments = memo[at_arguments] = storage, operands[offset], shape, steps, requires_grad == _TRUE, empty
        tensor = memo[at_tensor] = call(function, arguments)
        return tensor, match.end()

    return read
