"""Interprets a pickle without ever calling what the pickle names.

What a pickle names is looked up in a closed list of :class:`Global` entries, whose functions are this package's own; no
class is instantiated, no attribute set, and nothing imported at a pickle's wish. Python's own :class:`pickle.Unpickler`
is not safe even with ``find_class`` overridden: it sets attributes of whatever a BUILD opcode meets, takes objects from
``copyreg``'s cache of extensions, allocates what a LONG_BINPUT or a length claims, and hashes tuples that a
few dozen bytes make exponentially large.

Time and memory are linear in the size of the pickle: lengths are compared with the bytes that remain, memo indices with
the bytes so far, containers and what calls copy out of shared arguments are counted, keys that can be made to collide
are few, and :mod:`.tree` bounds what a walk through the result costs.

Source: ``pickletools.py`` of Python, protocols 2 to 5. Opcodes that no pickler writes for plain data (extension codes,
out-of-band buffers, instances of Python 2's classes) are refused, and so are those of protocols 0 and 1.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import CALL, NEW, Call, Global, Unmade, described, unsafe_error
from elastic_ckpt.formats.torch_archive.operations import OPERATIONS

#: Longest line of a name.
_MOST_LINE_NBYTES = 1 << 16
#: Size that the arguments of all calls may have per byte of the pickle, and in addition: a few bytes pass a shared
#: argument to a call that copies it.
_MOST_COPIED, _MOST_MORE_COPIED = 16, 1 << 16
#: Size of each part of an argument: characters and bytes, or items.
_PART_SIZES: dict[Any, int] = {
    **dict.fromkeys((str, bytes, bytearray), 1),
    **dict.fromkeys((list, tuple, dict, set, frozenset, OrderedDict, Counter), 16),
}
#: Containers, results of calls and unnumbered memo entries, which take up to 232 bytes for one of the pickle: one for
#: so many bytes of the file, and so many more. Marks: one for each container that is being filled.
_FILE_NBYTES_PER_CONTAINER, _MOST_MORE_CONTAINERS, _MOST_MARKS = 64, 1 << 18, 1 << 10
_UINT32 = struct.Struct("<I")
#: Opcodes that picklers write in protocols 0 and 1 alone.
_OF_PROTOCOL_0 = frozenset(b"2FILPSTUVdgiop")


class Machine:
    """Runs one pickle.

    Args:
        data: bytes that begin with the pickle at ``at``; what follows its end is not looked at.
        find: the entry of a global by (module, name), Python 2's names translated; raises for what is not allowed.
        load: the object of a persistent id.
        at: see ``data``.
        file_nbytes: size of the file, from which the number of containers follows that it may make.
        keeps: errors of what is refused that becomes :class:`Unmade` in the result; others are raised.
        is_trusted: whether counts and lengths are unbounded.
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
    ) -> None:
        self.data, self.at = data, at
        self.find, self._load = find, load
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self._keeps = keeps
        self.left = sys.maxsize if is_trusted else _MOST_COPIED * len(data) + _MOST_MORE_COPIED
        self.containers = (
            sys.maxsize if is_trusted else file_nbytes // _FILE_NBYTES_PER_CONTAINER + _MOST_MORE_CONTAINERS
        )

    def run(self) -> Any:  # noqa: PLR0912, PLR0915  see below
        """The pickled object; :attr:`at` is then behind the pickle.

        Raises :class:`pickle.UnpicklingError`, what ``find``, ``load`` and the functions of globals raise, and for
        noise :class:`IndexError`, :class:`KeyError`, :class:`ValueError`, :class:`TypeError` or :class:`struct.error`.
        """
        # the most frequent opcodes are inlined: a call for each would double the time
        data, at, stack, marks, memo = self.data, self.at, self.stack, self.marks, self.memo
        push, pop, uint32, start = stack.append, stack.pop, _UINT32.unpack_from, at
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
                if len(marks) > _MOST_MARKS:
                    raise pickle.UnpicklingError(f"more than {_MOST_MARKS} marks")
                marks.append(len(stack))
            elif code == 0x52:  # REDUCE
                arguments, function = pop(), stack[-1]
                stack[-1] = self.call(function, arguments)
            elif code == 0x6A:  # LONG_BINGET
                push(memo[uint32(data, at)[0]])
                at += 4
            elif code == 0x86:  # TUPLE2
                self.count_container()
                second = pop()
                stack[-1] = (stack[-1], second)
            elif code == 0x85:  # TUPLE1
                self.count_container()
                stack[-1] = (stack[-1],)
            elif code == 0x2E:  # STOP
                self.at = at
                return pop()
            else:
                self.at = at
                operation = OPERATIONS.get(code)
                if operation is None:
                    if data[start] != 0x80 and code in _OF_PROTOCOL_0:
                        raise UnsupportedError("this file was pickled with protocol 0 or 1, which is not supported")
                    raise pickle.UnpicklingError(
                        f"the opcode {code:#04x}, which data of protocols 2 to 5 does not need"
                    )
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
        """What a global makes of its arguments, or will."""
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"{described(function)} is called with no tuple")
        self.count_container()
        if type(function) is not Global or function.call is None:
            return self._called_later(function, arguments)
        if function.copies and arguments:
            self.charge(arguments)
        try:
            return function.call(*arguments)
        except ElasticCkptError as error:
            return self.unmade(error)
        except pickle.UnpicklingError:
            return self._first_unmade(arguments)

    def load(self, persistent_id: Any) -> Any:
        """The object of a persistent id."""
        try:
            return self._load(persistent_id)
        except ElasticCkptError as error:
            return self.unmade(error)

    def _called_later(self, function: Any, arguments: tuple[Any, ...], how: str = CALL) -> Any:
        if type(function) is Call or (type(function) is Global and function.users is not None):
            return Call(function, arguments, how)
        if type(function) is Unmade:
            return function
        if type(function) is Global:
            return self.unmade(function.error or unsafe_error(function.name))
        raise pickle.UnpicklingError(f"{described(function)} is called")

    def _first_unmade(self, arguments: tuple[Any, ...]) -> Unmade:
        """The first argument that is not made, in an exception handler; other exceptions are raised again."""
        for each in arguments:
            if type(each) is Unmade:
                return each
            if type(each) is Call:
                return self.unmade(unsafe_error(f"{each} in the arguments of another object"))
        raise  # noqa: PLE0704  what is being handled

    def new(self, cls: Any, arguments: Any) -> Any:
        """What NEWOBJ makes of a global; as by :mod:`pickle`, an object of a class of the user's is not initialized."""
        if type(cls) is Global and cls.call is None and cls.users is not None and type(arguments) is tuple:
            self.count_container()
            return self._called_later(cls, arguments, NEW)
        return self.call(cls, arguments)

    def unmade(self, error: ElasticCkptError) -> Unmade:
        """What stands for an object that is refused; raises the error where nothing may."""
        if not isinstance(error, self._keeps):
            raise error
        return Unmade(error)

    def count_container(self) -> None:
        """Count what takes much more memory than its opcode; :class:`pickle.UnpicklingError` if there are too many."""
        self.containers -= 1
        if self.containers < 0:
            text = 'many more containers than a file of this size has; "trust_pickle": true reads them'
            raise pickle.UnpicklingError(text)

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
