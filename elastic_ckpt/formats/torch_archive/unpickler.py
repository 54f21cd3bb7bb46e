"""Interprets a pickle without ever calling what the pickle names.

The package's docstring says what it may name, and what bounds time and memory. Python's own :class:`pickle.Unpickler`
is not safe even with ``find_class`` overridden: it sets attributes of whatever a BUILD opcode meets, takes objects from
``copyreg``'s cache of extensions, allocates what a LONG_BINPUT or a length claims, and hashes tuples that a
few dozen bytes make exponentially large. Source: ``pickletools.py`` and ``_pickle.c`` of Python, protocols 2 to 5.

Nothing that is read here is read by another unpickler as well, so that no difference between two of them matters.
Nevertheless a pickle whose bytes Python's own would group into other opcodes is refused (``tests/attacks`` compares
the two): frames hold whole opcodes, are not nested, and end with the pickle.
"""

from __future__ import annotations

import pickle
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any

from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import Call, Global, How, Step, checked_keys, described, unsafe_error
from elastic_ckpt.formats.torch_archive.charges import (
    CALL_NBYTES,
    CONTAINER_NBYTES,
    ERROR_NBYTES,
    ITEM_NBYTES,
    MEMBER_NBYTES,
    NAME_NBYTES,
    STEP_NBYTES,
    STORAGE_NBYTES,
    arguments_nbytes,
    items_nbytes,
    limit_unless_trusted,
    while_read,
)
from elastic_ckpt.formats.torch_archive.globals import set_state

#: Longest line of a name.
_MOST_LINE_NBYTES = 1 << 16
#: Largest number.
_MOST_NUMBER_NBYTES = 1 << 10
#: Most names.
_MOST_NAMES = 1 << 14
#: Bytes that calls may make of their arguments for each byte of the pickle: a few bytes pass a shared argument to a
#: call that copies it.
_MOST_COPIED = 200
#: Those in addition.
_MOST_MORE_COPIED = 1 << 18
#: Marks: one for each container that is being filled.
_MOST_MARKS = 1 << 10
_UINT32 = struct.Struct("<I")
#: Where a frame ends while there is none.
_NO_FRAME = sys.maxsize
#: Names of Python 2 are translated in pickles of protocols below this one, as pickle does.
_FIRST_PROTOCOL_OF_PYTHON_3 = 3
_HIGHEST_PROTOCOL = 5
#: Opcodes that picklers write in protocols 0 and 1 alone.
_OF_PROTOCOL_0 = frozenset(b"2FILPSTUVdgiop")


class Unpickler:
    """Runs the pickle that is at byte ``at`` of ``data``; what follows its end is not looked at.

    ``find`` gives the entry of a global by (module, name), Python 2's names translated, or raises; ``load`` the object
    of a persistent id. What is refused with an error of ``keeps`` becomes a :class:`Global` with it in the result;
    other errors are raised. ``file_nbytes`` bounds the :attr:`memory` of the objects, of which others of the file take
    ``held_nbytes``; ``nbytes`` are those of the pickle at most. Neither that bound nor those of counts and numbers hold
    for a pickle that ``is_trusted``.
    """

    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], Global],
        load: Callable[[Any], Any],
        at: int = 0,
        file_nbytes: int = 0,
        keeps: tuple[type[ElasticCkptError], ...] = (),
        is_trusted: bool = False,
        nbytes: int | None = None,
        held_nbytes: int = 0,
    ) -> None:
        self.data = data
        self.at = at
        self.is_trusted = is_trusted
        self._find = find
        self._load = load
        self._keeps = keeps
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.protocol = 0
        self.frame_end = _NO_FRAME
        self._globals: dict[tuple[str, str], Global] = {}
        nbytes = len(data) - at if nbytes is None else nbytes
        self.memory = while_read(file_nbytes, nbytes, is_trusted, held_nbytes)
        self.charge = self.memory.charge
        self._copies_left = sys.maxsize if is_trusted else _MOST_COPIED * len(data) + _MOST_MORE_COPIED

    def run(self) -> Any:  # noqa: PLR0912, PLR0915  see below
        """The pickled object; :attr:`at` is then behind the pickle.

        Raises :class:`pickle.UnpicklingError`, what ``find``, ``load`` and the functions of globals raise, and for
        noise :class:`IndexError`, :class:`KeyError`, :class:`ValueError`, :class:`TypeError` or :class:`struct.error`.
        """
        # the most frequent opcodes are inlined: a call for each would double the time
        data = self.data
        at = self.at
        stack = self.stack
        marks = self.marks
        memo = self.memo
        push = stack.append
        pop = stack.pop
        uint32 = _UINT32.unpack_from
        start = at
        charge = self.charge
        frame_end = self.frame_end
        while True:
            if at >= frame_end:
                self.end_frame(at)
                frame_end = _NO_FRAME
            code = data[at]
            at += 1
            if code == 0x72:  # LONG_BINPUT
                index = uint32(data, at)[0]
                if index > at:
                    raise pickle.UnpicklingError(f"entry {index} of a memo, at byte {at}")
                memo[index] = stack[-1]
                at += 4
            elif code == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
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
                if len(marks) > _MOST_MARKS and not self.is_trusted:
                    raise limit_unless_trusted(f"at most {_MOST_MARKS} containers that are being filled", "more")
                marks.append(len(stack))
            elif code == 0x52:  # REDUCE
                arguments = pop()
                function = stack[-1]
                stack[-1] = self.call(function, arguments)
            elif code == 0x6A:  # LONG_BINGET
                push(memo[uint32(data, at)[0]])
                at += 4
            elif code == 0x86:  # TUPLE2
                charge(CONTAINER_NBYTES)
                second = pop()
                stack[-1] = (stack[-1], second)
            elif code == 0x85:  # TUPLE1
                charge(CONTAINER_NBYTES)
                stack[-1] = (stack[-1],)
            elif code == 0x2E:  # STOP
                self.at = at
                if frame_end != _NO_FRAME:
                    self.end_frame(at)
                return pop()
            else:
                self.at = at
                if code in _VALUES:
                    push(_VALUES[code](self))
                elif code in _CONTAINERS:
                    charge(CONTAINER_NBYTES)
                    push(_CONTAINERS[code](self))
                elif code in _OPERATIONS:
                    _OPERATIONS[code](self)
                elif data[start] != 0x80 and code in _OF_PROTOCOL_0:
                    raise UnsupportedError("this file was pickled with protocol 0 or 1, which is not supported")
                else:
                    what = f"the opcode {code:#04x}, which data of protocols 2 to 5 does not need"
                    raise pickle.UnpicklingError(what)
                at = self.at
                frame_end = self.frame_end

    def begin_protocol(self) -> None:
        """Note the protocol that the pickle states."""
        self.protocol = self.take(1)[0]
        if self.protocol > _HIGHEST_PROTOCOL:
            raise pickle.UnpicklingError(f"protocol {self.protocol}, where {_HIGHEST_PROTOCOL} is the highest")

    def begin_frame(self) -> None:
        """Note where a frame ends: inside the data, and behind the frame before it."""
        nbytes = int.from_bytes(self.take(8), "little")
        if self.frame_end != _NO_FRAME or nbytes > len(self.data) - self.at:
            raise pickle.UnpicklingError(f"a frame of {nbytes} bytes at byte {self.at} of {len(self.data)}")
        self.frame_end = self.at + nbytes

    def end_frame(self, at: int) -> None:
        """Leave the frame, which must end where an opcode does."""
        if at != self.frame_end:
            raise pickle.UnpicklingError(f"a frame that ends at byte {self.frame_end}, not with the opcode at {at}")
        self.frame_end = _NO_FRAME

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > len(self.data) - self.at or nbytes < 0:
            raise pickle.UnpicklingError(f"{nbytes} bytes claimed at byte {self.at} of {len(self.data)}")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def block(self, width: int) -> bytes:
        """The bytes behind their length, which takes ``width`` bytes."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def line(self) -> str:
        """The next line, without its end."""
        end = self.data.find(b"\n", self.at, self.at + _MOST_LINE_NBYTES)
        if end < 0:
            raise pickle.UnpicklingError(f"a line without an end at byte {self.at}")
        return self.take(end + 1 - self.at)[:-1].decode()

    def last(self, count: int) -> list[Any]:
        """Take the topmost objects."""
        items = self.stack[-count:]
        del self.stack[-count:]
        if len(items) < count:
            raise pickle.UnpicklingError(f"{count} objects, of which there are {len(items)}")
        return items

    def marked(self) -> list[Any]:
        """Take everything above the topmost mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def find(self, module: Any, name: Any) -> Global:
        """What stands for a name, of Python 2 or 3."""
        if type(name) is not str or type(module) is not str:
            raise pickle.UnpicklingError("a global whose name is no string")
        key = module, name
        if self.protocol < _FIRST_PROTOCOL_OF_PYTHON_3:
            module, name = NAME_MAPPING.get(key, key)
            key = IMPORT_MAPPING.get(module, module), name
        if key not in self._globals:
            self.charge(NAME_NBYTES + len(key[0]) + len(key[1]))
            if len(self._globals) >= _MOST_NAMES and not self.is_trusted:
                raise limit_unless_trusted(f"at most {_MOST_NAMES} names of classes and functions", "more")
            self._globals[key] = self._find(*key)
        return self._globals[key]

    def call(self, function: Any, arguments: Any, *, how: How = "call") -> Any:
        """What a global makes of its arguments, or will."""
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"{described(function)} is called with no tuple")
        self.charge(CALL_NBYTES)
        if type(function) is Call and function.is_users and function.how != "member":
            return Call(function, arguments)
        if type(function) is not Global:
            raise pickle.UnpicklingError(f"{described(function)} is called")
        # functions that rebuild tensors look at each of their arguments
        passed = next(filter(_is_function, arguments), None) if function.copies else None
        if passed is not None:
            return self.refused(unsafe_error(f"{passed} in the arguments of {function}"))
        if function.users is not None:
            return Call(function, arguments, how)
        return self.call_listed(function, arguments)

    def call_listed(self, function: Global, arguments: tuple[Any, ...]) -> Any:
        """What a global of the closed list makes of its arguments."""
        if function.call is None:
            return self.refused(function.error or unsafe_error(function.name))
        if function.copies and arguments:
            self.charge_copies(arguments)
        try:
            return function.call(*arguments)
        except ElasticCkptError as error:
            return self.refused(error)
        except pickle.UnpicklingError:
            for each in arguments:
                unsafe = unsafe_error(f"{each} in the arguments of another object") if type(each) is Call else None
                if (why := each.error if type(each) is Global else unsafe) is not None:
                    return self.refused(why)
            raise

    def load(self, persistent_id: Any) -> Any:
        """The object of a persistent id."""
        self.charge(STORAGE_NBYTES)
        try:
            return self._load(persistent_id)
        except ElasticCkptError as error:
            return self.refused(error)

    def refused(self, error: ElasticCkptError) -> Global:
        """What stands for an object that is refused; raises the error where nothing may."""
        if not isinstance(error, self._keeps):
            raise error
        self.charge(ERROR_NBYTES)
        return Global(str(error.found), error=error.with_traceback(None))

    def charge_copies(self, arguments: Any) -> None:
        """Charge what is made of arguments or a state; few bytes of a pickle must not have much copied."""
        nbytes = arguments_nbytes(arguments)
        self.charge(nbytes)
        self._copies_left -= nbytes
        if self._copies_left < 0:
            raise limit_unless_trusted("objects whose parts are their own", "many objects that copy the same bytes")


def _is_function(argument: Any) -> bool:
    return type(argument) is Global and argument.is_function


def _long(machine: Unpickler, width: int) -> int:
    raw = machine.block(width)
    if len(raw) > _MOST_NUMBER_NBYTES and not machine.is_trusted:
        raise limit_unless_trusted(f"integers of at most {_MOST_NUMBER_NBYTES} bytes", f"one of {len(raw)}")
    return int.from_bytes(raw, "little", signed=True)


def _memoize(machine: Unpickler) -> None:
    machine.charge(CONTAINER_NBYTES)
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _charged(machine: Unpickler, each_nbytes: int = ITEM_NBYTES) -> list[Any]:
    """What is above the topmost mark, as items of a container."""
    items = machine.marked()
    machine.charge(each_nbytes * len(items))
    return items


def _fill(kind: Step, items: list[Any], machine: Unpickler) -> None:
    """Give the topmost object items, members or pairs; who is not made yet keeps them for later."""
    target = machine.stack[-1]
    keys = items[::2]
    if kind == "pairs" and len(items) % 2:
        raise pickle.UnpicklingError("a key without a value")
    of_call = STEP_NBYTES if type(target) is Call else 0
    machine.charge(of_call + items_nbytes(target, len(keys) if kind == "pairs" else len(items)))
    if type(target) is Call:
        checked_keys(keys if kind == "pairs" else [])
        target.steps.append((kind, items))
    elif kind == "items" and type(target) is list:
        target += items
    elif kind == "members" and type(target) is set:
        target.update(checked_keys(items, len(target)))
    elif kind == "pairs" and type(target) is dict and {str}.issuperset(map(type, keys)):
        target.update(zip(keys, items[1::2], strict=True))
    elif kind == "pairs" and isinstance(target, dict):
        target.update(zip(checked_keys(keys, len(target)), items[1::2], strict=True))
    elif type(target) is not Global or target.error is None:
        raise pickle.UnpicklingError(f"an object of type {type(target).__name__} is given {kind}")


def _build(machine: Unpickler) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    machine.charge(STEP_NBYTES)
    machine.charge_copies(state)
    try:
        set_state(target, state)
    except ElasticCkptError as error:  # of an array, whose elements are refused
        target.function = machine.refused(error)


def _pop(machine: Unpickler) -> None:
    """Of a tuple that is part of itself, which was pickled already while its items were."""
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


#: What pushes a value, by opcode.
_VALUES: dict[int, Callable[[Unpickler], Any]] = {
    pickle.NONE[0]: lambda machine: None,
    pickle.NEWTRUE[0]: lambda machine: True,
    pickle.NEWFALSE[0]: lambda machine: False,
    pickle.EMPTY_TUPLE[0]: lambda machine: (),
    pickle.BININT[0]: lambda machine: int.from_bytes(machine.take(4), "little", signed=True),
    pickle.LONG1[0]: lambda machine: _long(machine, 1),
    pickle.LONG4[0]: lambda machine: _long(machine, 4),
    pickle.BINFLOAT[0]: lambda machine: struct.unpack(">d", machine.take(8))[0],
    pickle.SHORT_BINUNICODE[0]: lambda machine: machine.block(1).decode("utf-8", "surrogatepass"),
    pickle.BINUNICODE8[0]: lambda machine: machine.block(8).decode("utf-8", "surrogatepass"),
    pickle.SHORT_BINBYTES[0]: lambda machine: machine.block(1),
    pickle.BINBYTES[0]: lambda machine: machine.block(4),
    pickle.BINBYTES8[0]: lambda machine: machine.block(8),
    pickle.BYTEARRAY8[0]: lambda machine: bytearray(machine.block(8)),
    pickle.BINPERSID[0]: lambda machine: machine.load(machine.stack.pop()),
    pickle.GLOBAL[0]: lambda machine: machine.find(machine.line(), machine.line()),
    pickle.STACK_GLOBAL[0]: lambda machine: machine.find(*machine.last(2)),
    pickle.NEWOBJ[0]: lambda machine: machine.call(*machine.last(2), how="new"),
}
#: What pushes a container.
_CONTAINERS: dict[int, Callable[[Unpickler], Any]] = {
    pickle.EMPTY_LIST[0]: lambda machine: [],
    pickle.EMPTY_DICT[0]: lambda machine: {},
    pickle.EMPTY_SET[0]: lambda machine: set(),
    pickle.TUPLE3[0]: lambda machine: tuple(machine.last(3)),
    pickle.TUPLE[0]: lambda machine: tuple(_charged(machine)),
    pickle.LIST[0]: _charged,
    pickle.FROZENSET[0]: lambda machine: frozenset(checked_keys(_charged(machine, MEMBER_NBYTES))),
}
#: What pushes nothing.
_OPERATIONS: dict[int, Callable[[Unpickler], Any]] = {
    pickle.PROTO[0]: Unpickler.begin_protocol,
    pickle.FRAME[0]: Unpickler.begin_frame,
    pickle.MEMOIZE[0]: _memoize,
    pickle.APPEND[0]: lambda machine: _fill("items", machine.last(1), machine),
    pickle.APPENDS[0]: lambda machine: _fill("items", machine.marked(), machine),
    pickle.SETITEM[0]: lambda machine: _fill("pairs", machine.last(2), machine),
    pickle.SETITEMS[0]: lambda machine: _fill("pairs", machine.marked(), machine),
    pickle.ADDITEMS[0]: lambda machine: _fill("members", machine.marked(), machine),
    pickle.BUILD[0]: _build,
    pickle.POP[0]: _pop,
    pickle.POP_MARK[0]: lambda machine: machine.marked(),
}
