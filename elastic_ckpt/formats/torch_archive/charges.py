"""What the objects of a file take of memory, charged before they are made.

Charges are upper bounds for CPython 3.10 to 3.13, with what a walk through an object adds to it: the tests measure real
ones. What a pickle's bytes become by themselves (numbers, strings, entries of the memo, the stack) is bounded by their
number, and is not charged one by one.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic_ckpt.errors import Remedy, UnsupportedError

#: Objects take at most so many times the size of their file.
_MOST_TIMES = 8
#: Or so many bytes.
_MOST_NBYTES = 2 << 30
#: For each byte of a pickle while it is interpreted: of an entry of the memo, which 5 bytes make.
_NBYTES_WHILE_READ = 26
#: And then: of a string, which 4 bytes make.
_NBYTES_BEHIND = 16
#: A container without its items.
CONTAINER_NBYTES = 400
#: What stands for the result of a call.
CALL_NBYTES = 512
#: What stands for a storage.
STORAGE_NBYTES = 640
NAME_NBYTES = 1536
#: An error that is kept.
ERROR_NBYTES = 2048
#: What a call is given by one opcode, without the items.
STEP_NBYTES = 256
#: An item of a list or tuple.
ITEM_NBYTES = 26
#: A pair of a dictionary, just after its table grew.
PAIR_NBYTES = 140
#: A member of a set, just after its table grew.
MEMBER_NBYTES = 160
#: A pair of an ordered dictionary. Each part of an argument of a call may become one.
ORDERED_NBYTES = 200
#: A character or byte of an argument that a call copies.
_TEXT_NBYTES = 2
#: What is made of a call or tensor.
MADE_NBYTES = 1024
#: That a container is known to have been copied.
COPIED_NBYTES = 640
_PART_NBYTES: dict[Any, int] = {
    **dict.fromkeys((str, bytes, bytearray), _TEXT_NBYTES),
    **dict.fromkeys((list, tuple, dict, set, frozenset, OrderedDict, Counter), ORDERED_NBYTES),
}


class MemoryBudget:
    """What is left of the memory that the objects of a file may take; :attr:`used` is what was charged so far."""

    def __init__(self, file_nbytes: int, used: int = 0, *, is_unbounded: bool = False) -> None:
        self.file_nbytes = file_nbytes
        self.most = sys.maxsize if is_unbounded else max(_MOST_TIMES * file_nbytes, _MOST_NBYTES)
        self.used = used

    def charge(self, nbytes: int) -> None:
        """Bytes that are about to be taken; :class:`UnsupportedError` if the file's size does not allow them."""
        self.used += nbytes
        if self.used > self.most:
            problem = "the objects of this file take more memory than elastic_ckpt spends on a file of its size"
            expected = f"at most {self.most} bytes, of a file of {self.file_nbytes}"
            remedy = (
                "the file may be intact: this is a limit of elastic_ckpt. Keep large lists and dictionaries of the "
            )
            remedy += "client state as tensors or arrays, or leave them out"
            raise UnsupportedError(problem, expected=expected, found=f"{self.used} bytes or more", remedy=remedy)

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Gives back what the body takes: nothing that it makes is kept."""
        used = self.used
        try:
            yield
        finally:
            self.used = used


def while_read(file_nbytes: int, pickle_nbytes: int, is_trusted: bool, held_nbytes: int = 0) -> MemoryBudget:
    """The budget of a pickle while it is interpreted; other objects of the file take ``held_nbytes``."""
    used = held_nbytes + _NBYTES_WHILE_READ * pickle_nbytes
    return MemoryBudget(file_nbytes, used, is_unbounded=is_trusted)


def left_behind(budget: MemoryBudget, pickle_nbytes: int) -> int:
    """Bytes that the objects of a pickle that was read still take, with those that were held before."""
    return budget.used - (_NBYTES_WHILE_READ - _NBYTES_BEHIND) * pickle_nbytes


def arguments_nbytes(arguments: Any) -> int:
    """Bytes of what a call makes of its arguments, if it copies each."""
    total = 0
    if type(arguments) is tuple:
        total = ORDERED_NBYTES * len(arguments)  # as those of a path
        for each in arguments:
            if type(each) in _PART_NBYTES:
                total += _PART_NBYTES[type(each)] * len(each)
    elif type(arguments) in _PART_NBYTES:
        total = _PART_NBYTES[type(arguments)] * len(arguments)
    return total


def items_nbytes(container: Any, count: int) -> int:
    """Bytes of so many items, pairs or members of a container."""
    if isinstance(container, OrderedDict):
        return ORDERED_NBYTES * count
    if isinstance(container, dict):
        return PAIR_NBYTES * count
    return (MEMBER_NBYTES if isinstance(container, (set, frozenset)) else ITEM_NBYTES) * count


def limit_error(expected: str, found: str, path: str | None = None) -> UnsupportedError:
    """What elastic_ckpt does not read, because hostile files have it: the file may be whole."""
    problem = "this file has what elastic_ckpt reads up to a limit, and more of it"
    another_form = Remedy("the file may be intact: this is a limit of elastic_ckpt. Save it in another form")
    return UnsupportedError(problem, path, expected, found, remedy=another_form)


def limit_unless_trusted(expected: str, found: str) -> UnsupportedError:
    """The same, of a limit that is not one for a trusted pickle."""
    error = limit_error(expected, found)
    trusted = Remedy(when="if you trust whoever wrote the file", config={"trust_pickle": True})
    error.remedy = (*error.remedies, trusted)
    return error
