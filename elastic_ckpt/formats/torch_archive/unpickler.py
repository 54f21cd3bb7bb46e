"""Interprets a pickle without ever calling what the pickle names.

What a pickle names is looked up in a closed list of :class:`Global` entries, whose functions are this package's own; no
class is instantiated, no attribute set, and nothing imported at a pickle's wish. Python's own :class:`pickle.Unpickler`
is not safe even with ``find_class`` overridden: it sets attributes of whatever a BUILD opcode meets, takes objects from
``copyreg``'s cache of extensions, allocates what a LONG_BINPUT or a length claims, and hashes tuples that a
few dozen bytes make exponentially large.

Time and memory are linear in the size of the pickle: lengths are compared with the bytes that remain, memo indices with
the bytes so far, what calls copy out of shared arguments is counted, keys that can be made to collide are few, and
:mod:`.tree` bounds what a walk through the result costs.

Source: ``pickletools.py`` of Python, protocols 0 to 5. Opcodes that no pickler writes for plain data (extension codes,
out-of-band buffers, instances of Python 2's classes, recursive tuples) are refused.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from elastic_ckpt.formats.torch_archive.keys import check_key, checked_keys
from elastic_ckpt.formats.torch_archive.tensor_opcodes import tensor_reader

#: Longest line of a text opcode (protocol 0), and largest number in bytes or digits: Python converts up to 4,300.
_MOST_LINE_NBYTES, _MOST_NUMBER_NBYTES = 1 << 16, 1 << 10
#: Size that the arguments of all calls may have per byte of the pickle, and in addition: a few bytes pass a shared
#: argument to a call that copies it.
_MOST_COPIED, _MOST_MORE_COPIED = 16, 1 << 16
#: Size of each part of an argument: characters and bytes, or items.
_PART_SIZES: dict[Any, int] = {
    **dict.fromkeys((str, bytes, bytearray), 1),
    **dict.fromkeys((list, tuple, dict, set, frozenset, OrderedDict, Counter), 16),
}
_UINT32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Global:
    """What a name in a pickle stands for: ``call`` takes the arguments of REDUCE or NEWOBJ; ``None``: no callable.

    It stays in the tree where a pickle keeps the name itself, as for ``torch.float32``. ``is_users``: ``call`` is the
    real class or function, which the user allowed. ``copies``: its result may be as large as its arguments.
    """

    name: str
    call: Callable[..., Any] | None = None
    is_users: bool = False
    copies: bool = True

    is_plain_key: ClassVar[bool] = True

    def __repr__(self) -> str:
        return self.name


class Machine:
    """Runs one pickle.

    Args:
        data: bytes that begin with the pickle at ``at``; what follows its end is not looked at.
        find: the entry of a global by (module, name), Python 2's names translated; raises for what is not allowed.
        load: the object of a persistent id.
        build: sets the state of an object, as BUILD asks for; raises for any object it does not know.
    """

    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], Global],
        load: Callable[[Any], Any],
        build: Callable[[Any, Any], None],
        at: int = 0,
    ) -> None:
        self.data, self.at = data, at
        self.find, self.load, self.build = find, load, build
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.left = _MOST_COPIED * len(data) + _MOST_MORE_COPIED

    def run(self) -> Any:  # noqa: PLR0912, PLR0915  see below
        """The pickled object; :attr:`at` is then behind the pickle.

        Raises :class:`pickle.UnpicklingError`, what ``find``, ``load`` and the functions of globals raise, and for
        noise :class:`IndexError`, :class:`KeyError`, :class:`ValueError`, :class:`TypeError` or :class:`struct.error`.
        """
        # the most frequent opcodes, alone and together, are inlined: a call for each would double the time
        data, at, stack, marks, memo = self.data, self.at, self.stack, self.marks, self.memo
        push, pop, uint32 = stack.append, stack.pop, _UINT32.unpack_from
        read_tensor = tensor_reader(data, memo, self.load, self.call)
        while True:
            code = data[at]
            at += 1
            if code == 0x72:  # LONG_BINPUT
                index = uint32(data, at)[0]
                if index > at:
                    raise pickle.UnpicklingError(f"entry {index} of a memo, at byte {at}")
                memo[index] = stack[-1]
                at += 4
            elif code == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x68:  # BINGET
                push(memo[data[at]])
                at += 1
            elif code == 0x58:  # BINUNICODE
                end = at + 4 + uint32(data, at)[0]
                if end > len(data):
                    raise pickle.UnpicklingError(f"a string that ends at byte {end} of {len(data)}")
                push(data[at + 4 : end].decode("utf-8", "surrogatepass"))
                at = end
            elif code == 0x28:  # MARK
                tensor = read_tensor(at, stack[-1]) if data[at] == 0x28 and stack else None
                if tensor is None:
                    marks.append(len(stack))
                else:
                    stack[-1], at = tensor
            elif code == 0x52:  # REDUCE
                arguments, function = pop(), stack[-1]
                stack[-1] = self.call(function, arguments)
            elif code == 0x6A:  # LONG_BINGET
                push(memo[uint32(data, at)[0]])
                at += 4
            elif code == 0x86:  # TUPLE2
                second = pop()
                stack[-1] = (stack[-1], second)
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x2E:  # STOP
                self.at = at
                return pop()
            else:
                self.at = at
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise pickle.UnpicklingError(f"the opcode {code:#04x}, which plain data does not need")
                operation(self)
                at = self.at

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > len(self.data) - self.at or nbytes < 0:
            raise pickle.UnpicklingError(f"{nbytes} bytes claimed at byte {self.at} of {len(self.data)}")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, nbytes: int) -> int:
        """The next bytes as an unsigned number."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> bytes:
        """The next line, without its end."""
        end = self.data.find(b"\n", self.at, self.at + _MOST_LINE_NBYTES)
        if end < 0:
            raise pickle.UnpicklingError(f"a line without an end at byte {self.at}")
        line = self.take(end - self.at)
        self.at += 1
        return line

    def call(self, function: Any, arguments: Any) -> Any:
        """What a global makes of its arguments."""
        if type(function) is not Global or function.call is None or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"{described(function)} is called")
        if function.copies and arguments:
            self.charge(arguments)
        return function.call(*arguments)

    def charge(self, arguments: Any) -> None:
        """Count the lengths of what is copied; :class:`pickle.UnpicklingError` if the pickle is much shorter."""
        left = self.left
        for each in (arguments, *arguments) if type(arguments) is tuple else (arguments,):
            if type(each) in _PART_SIZES:
                left -= len(each) * _PART_SIZES[type(each)]
        if left < 0:
            raise pickle.UnpicklingError("objects that are made again and again from the same large parts")
        self.left = left

    def pop_mark(self) -> list[Any]:
        """Everything above the topmost mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items


def described(value: Any) -> str:
    """A value for an error message. The ``repr`` of a few shared tuples can be exponentially long."""
    return repr(value)[:100] if type(value) in (str, Global) else f"an object of type {type(value).__name__}"


def _push(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    """The operation that pushes what ``value`` reads."""
    return lambda machine: machine.stack.append(value(machine))


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def _skip(nbytes: int) -> Callable[[Machine], None]:
    """PROTO and FRAME: what they announce is not needed."""

    def skip(machine: Machine) -> None:
        machine.take(nbytes)

    return skip


def _text(machine: Machine, width: int) -> str:
    return machine.take(machine.number(width)).decode("utf-8", "surrogatepass")


def _long(machine: Machine, width: int) -> int:
    nbytes = machine.number(width)
    if nbytes > _MOST_NUMBER_NBYTES:
        raise pickle.UnpicklingError(f"an integer of {nbytes} bytes")
    return int.from_bytes(machine.take(nbytes), "little", signed=True)


def _float(machine: Machine) -> float:
    """FLOAT of protocol 0."""
    line = machine.line()
    if len(line) > _MOST_NUMBER_NBYTES:
        raise pickle.UnpicklingError(f"a number of {len(line)} digits")
    return float(line)


def _decimal(machine: Machine) -> bool | int:
    """INT and LONG of protocol 0, in which INT writes booleans as 00 and 01."""
    line = machine.line().removesuffix(b"L")
    if len(line) > _MOST_NUMBER_NBYTES:
        raise pickle.UnpicklingError(f"an integer of {len(line)} digits")
    return line == b"01" if line in (b"00", b"01") else int(line)


def _quoted(machine: Machine) -> str:
    """STRING of protocol 0."""
    line = machine.line()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
        raise pickle.UnpicklingError("a string without quotes")
    return line[1:-1].decode("unicode_escape")


def _tuple3(machine: Machine) -> None:
    first, second, third = machine.stack[-3:]  # ValueError if there are fewer
    machine.stack[-3:] = [(first, second, third)]


def _put(index: Callable[[Machine], int]) -> Callable[[Machine], None]:
    def put(machine: Machine) -> None:
        position = index(machine)
        if not 0 <= position <= machine.at:
            raise pickle.UnpicklingError(f"entry {position} of a memo, at byte {machine.at}")
        machine.memo[position] = machine.stack[-1]

    return put


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


def _appends(machine: Machine) -> None:
    items = machine.pop_mark()
    _extend(machine.stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise pickle.UnpicklingError(f"items are appended to an object of type {type(target).__name__}")
    target += items


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])


def _set_items(machine: Machine) -> None:
    items = machine.pop_mark()
    _update(machine.stack[-1], items)


def _update(target: Any, items: list[Any]) -> None:
    if not isinstance(target, (dict, OrderedDict, Counter)) or len(items) % 2:
        raise pickle.UnpicklingError(f"items are set in an object of type {type(target).__name__}, or half of one")
    keys = items[::2]
    if type(target) is dict and {str}.issuperset(map(type, keys)):
        target.update(zip(keys, items[1::2], strict=True))
        return
    for key, value in zip(keys, items[1::2], strict=True):
        if type(key) is not str:
            check_key(key, len(target))
        target[key] = value


def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    if type(machine.stack[-1]) is not set:
        raise pickle.UnpicklingError(f"members are added to an object of type {type(machine.stack[-1]).__name__}")
    machine.stack[-1] |= set(checked_keys(items, len(machine.stack[-1])))


def _global(machine: Machine, module: str, name: str) -> Global:
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    module = IMPORT_MAPPING.get(module, module)
    if (module, name) not in machine.globals:
        machine.globals[module, name] = machine.find(module, name)
    return machine.globals[module, name]


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise pickle.UnpicklingError("a global whose name is no string")
    machine.stack.append(_global(machine, module, name))


def _new_object(machine: Machine) -> None:
    arguments, cls = machine.stack.pop(), machine.stack[-1]
    if type(cls) is Global and cls.is_users and isinstance(cls.call, type):  # as pickle does: not initialized
        cls = Global(cls.name, partial(cls.call.__new__, cls.call))
    machine.stack[-1] = machine.call(cls, arguments)


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    machine.charge(state)
    machine.build(target, state)


def _new_dict(items: list[Any]) -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    _update(new, items)
    return new


_OPERATIONS: dict[int, Callable[[Machine], None]] = {
    pickle.PROTO[0]: _skip(1),
    pickle.FRAME[0]: _skip(8),
    pickle.NONE[0]: _constant(None),
    pickle.NEWTRUE[0]: _constant(True),
    pickle.NEWFALSE[0]: _constant(False),
    pickle.EMPTY_TUPLE[0]: _constant(()),
    pickle.EMPTY_LIST[0]: _push(lambda machine: []),
    pickle.EMPTY_DICT[0]: lambda machine: machine.stack.append({}),
    pickle.BINPUT[0]: _put(lambda machine: machine.number(1)),
    pickle.BININT[0]: _push(lambda machine: int.from_bytes(machine.take(4), "little", signed=True)),
    pickle.EMPTY_SET[0]: _push(lambda machine: set()),
    pickle.INT[0]: _push(_decimal),
    pickle.LONG[0]: _push(_decimal),
    pickle.LONG1[0]: _push(lambda machine: _long(machine, 1)),
    pickle.LONG4[0]: _push(lambda machine: _long(machine, 4)),
    pickle.FLOAT[0]: _push(_float),
    pickle.BINFLOAT[0]: _push(lambda machine: struct.unpack(">d", machine.take(8))[0]),
    pickle.STRING[0]: _push(_quoted),
    pickle.UNICODE[0]: _push(lambda machine: machine.line().decode("raw-unicode-escape")),
    pickle.BINSTRING[0]: _push(lambda machine: _text(machine, 4)),
    pickle.SHORT_BINSTRING[0]: _push(lambda machine: _text(machine, 1)),
    pickle.SHORT_BINUNICODE[0]: _push(lambda machine: _text(machine, 1)),
    pickle.BINUNICODE8[0]: _push(lambda machine: _text(machine, 8)),
    pickle.SHORT_BINBYTES[0]: _push(lambda machine: machine.take(machine.number(1))),
    pickle.BINBYTES[0]: _push(lambda machine: machine.take(machine.number(4))),
    pickle.BINBYTES8[0]: _push(lambda machine: machine.take(machine.number(8))),
    pickle.BYTEARRAY8[0]: _push(lambda machine: bytearray(machine.take(machine.number(8)))),
    pickle.TUPLE3[0]: _tuple3,
    pickle.TUPLE[0]: _push(lambda machine: tuple(machine.pop_mark())),
    pickle.BINPERSID[0]: _push(lambda machine: machine.load(machine.stack.pop())),
    pickle.LIST[0]: _push(lambda machine: machine.pop_mark()),
    pickle.DICT[0]: _push(lambda machine: _new_dict(machine.pop_mark())),
    pickle.FROZENSET[0]: _push(lambda machine: frozenset(checked_keys(machine.pop_mark()))),
    pickle.APPEND[0]: _append,
    pickle.APPENDS[0]: _appends,
    pickle.SETITEM[0]: _set_item,
    pickle.SETITEMS[0]: _set_items,
    pickle.ADDITEMS[0]: _add_items,
    pickle.GET[0]: _push(lambda machine: machine.memo[int(machine.line())]),
    pickle.PUT[0]: _put(lambda machine: int(machine.line())),
    pickle.MEMOIZE[0]: _put(lambda machine: len(machine.memo)),
    pickle.GLOBAL[0]: _push(lambda machine: _global(machine, machine.line().decode(), machine.line().decode())),
    pickle.STACK_GLOBAL[0]: _stack_global,
    pickle.NEWOBJ[0]: _new_object,
    pickle.BUILD[0]: _build,
}
