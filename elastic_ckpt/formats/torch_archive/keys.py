"""What may be a key of a dictionary or a member of a set: what is hashed and found in bounded time."""

from __future__ import annotations

import pickle
from typing import Any

#: Most objects in a dictionary key or set member.
_MOST_KEY_OBJECTS = 32
#: Smaller integers are their own hashes. Greater ones, floats and tuples can be made to collide: a dictionary or set
#: takes them as long as it has fewer entries. Strings and bytes are hashed with a random seed of the process.
_LARGEST_KEY, _MOST_COLLIDING = 1 << 60, 1 << 12
_PLAIN_KEYS = (str, bool, bytes, type(None))


def checked_keys(items: Any, others: int = 0) -> list[Any]:
    """The items, once all of them are known to be harmless as keys beside ``others``."""
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError(f"members in an object of type {type(items).__name__}")
    for position, item in enumerate(items, others):
        check_key(item, position)
    return list(items)


def check_key(key: Any, others: int) -> None:
    """Raise :class:`pickle.UnpicklingError` for a key that could take long to hash or to find among the ``others``."""
    if isinstance(key, _PLAIN_KEYS) or (type(key) is int and -_LARGEST_KEY < key < _LARGEST_KEY):
        return
    left, waiting = _MOST_KEY_OBJECTS, [key]
    while waiting:
        each = waiting.pop()
        left -= 1
        is_tuple = isinstance(each, tuple) and type(each).__hash__ is tuple.__hash__
        if (is_tuple or type(each) is frozenset) and len(each) <= left:
            waiting += each
        elif _is_plain_key(each) and left >= 0:
            waiting += getattr(each, "__dict__", {}).values()  # the real object may hash them
        elif left < 0 or not (isinstance(each, _PLAIN_KEYS) or type(each) in (int, float)):
            raise pickle.UnpicklingError(f"a key of type {type(each).__name__}, or of too many parts")
    if others > _MOST_COLLIDING and not _is_plain_key(key):
        raise pickle.UnpicklingError(f"more than {_MOST_COLLIDING} keys that are tuples, or large or real numbers")


def _is_plain_key(key: Any) -> bool:
    return getattr(type(key), "is_plain_key", False)
