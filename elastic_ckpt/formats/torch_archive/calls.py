"""What a pickle names, and what it asks to be called: data, until a result is wanted by who may have it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_ckpt.errors import ElasticCkptError, Remedy, UnsafePickleError
from elastic_ckpt.formats.torch_archive.charges import limit_error

#: How a :class:`Call` is made: "new", of NEWOBJ, is an object that is not initialized; "member" one of an enum, by its
#: name; "tensor" one that is not dense; "subclass" one of a class of the user's, made of a dense one, and "wrapper" one
#: whose elements are in its attributes. And what is done with its result.
How = Literal["call", "new", "member", "tensor", "subclass", "wrapper"]
Step = Literal["state", "items", "pairs", "members"]
#: Most objects in a dictionary key or set member: hashing recurses into them.
_MOST_KEY_OBJECTS = 32
#: Length of a text or bytes in a key of several parts: equal ones are compared again and again if their keys collide.
_LONGEST_KEY_PART = 1 << 10
#: Smaller integers are their own hashes. Greater ones, floats and tuples can be made to collide.
LARGEST_KEY = 1 << 60
#: A dictionary or set takes these as long as it has fewer entries. Strings and bytes are hashed with a random seed of
#: the process.
_MOST_COLLIDING = 1 << 12
_LARGEST_SIZE = 1 << 63
_PLAIN_KEYS = (str, bool, bytes, type(None))
_PLAIN_TYPES = frozenset(_PLAIN_KEYS)
#: ``deepspeed.runtime.zero.config.ZeroStageEnum``, as Python 3.11.0 to 3.11.3 pickle it by name.
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


@dataclass(frozen=True, slots=True)
class Global:
    """What a name in a pickle stands for; it stays in the tree where a pickle keeps the name, as for ``torch.float32``.

    With an error it stands for any object that is refused, whose states and items are dropped.
    """

    name: str  # the qualified one
    call: Callable[..., Any] | None = None  # of this package, which takes the arguments of REDUCE or NEWOBJ
    #: The real class or function, where the user allowed it: it is called when its result is wanted.
    users: Any = field(default=None, compare=False)
    error: ElasticCkptError | None = field(default=None, compare=False)  # raised when the object is wanted
    copies: bool = True  # whether the result of ``call`` may be as large as its arguments
    is_function: bool = False  # no class or value: refused wherever it is not called

    def __repr__(self) -> str:
        return self.name


class Call:
    """An object that is made when it is wanted: by calling what, with what, and which state and items it then gets.

    What is called is a :class:`Global`, or the result of another call. The attributes of an object of a listed class
    are the call's own.
    """

    __slots__ = ("__dict__", "args", "function", "how", "steps")

    def __init__(self, function: Any, args: tuple[Any, ...] = (), how: How = "call") -> None:
        self.function = function
        self.args = args
        self.how = how
        self.steps: list[tuple[Step, list[Any]]] = []  # with values; of a state, one

    @property
    def name(self) -> str:
        return str(self.function)

    @property
    def is_users(self) -> bool:
        """Whether the user allowed what is called; the result of no other call is called."""
        return type(self.function) is Call or self.function.users is not None

    def __int__(self) -> int:
        return STAGES[self.args[0]] if self.how == "member" else int(self.args[0])

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:  # by which files are compared
        is_short = {int, str}.issuperset(map(type, self.args))
        return f"{self.name}({', '.join(map(repr, self.args))})" if is_short else self.name


class Size(tuple[int, ...]):
    """``torch.Size``."""

    __slots__ = ()

    def __new__(cls, sizes: Any = ()) -> Size:
        if type(sizes) not in (tuple, list) or not {int}.issuperset(map(type, sizes)):
            raise pickle.UnpicklingError("a torch.Size that is no list of integers")
        if not all(-_LARGEST_SIZE <= size < _LARGEST_SIZE for size in sizes):
            raise pickle.UnpicklingError("a torch.Size of integers beyond 64 bits")
        return super().__new__(cls, sizes)


def described(value: Any) -> str:
    """A value for an error message. The ``repr`` of a few shared tuples can be exponentially long."""
    return repr(value)[:100] if type(value) in (str, Global) else f"an object of type {type(value).__name__}"


def unsafe_error(found: str) -> UnsafePickleError:
    """A name, or a use of it, that is not on the closed list."""
    problem = "this file asks for a Python class or function that is not on the list of safe globals"
    expected = "tensors, containers, numbers, strings, and DeepSpeed's own small classes"
    trusted = "if you trust whoever wrote the file"
    allow = "torch.serialization.add_safe_globals([TheClass])"
    remedy = Remedy(when=trusted, code=allow), Remedy(when=trusted, config={"trust_pickle": True})
    return UnsafePickleError(problem, expected=expected, found=f"Unsupported GLOBAL {found}"[:300], remedy=remedy)


def refuse_errors(*values: Any) -> None:
    """Raise the error of a value that stands for an object that is refused."""
    for value in values:
        if type(value) is Global and value.error is not None:
            raise value.error


def checked_keys(items: Any, others: int = 0) -> list[Any]:
    """The items, once all of them are known to be harmless as keys beside ``others``."""
    if type(items) not in (list, tuple):
        raise pickle.UnpicklingError(f"members in an object of type {type(items).__name__}")
    kinds = {*map(type, items)}
    if kinds <= _PLAIN_TYPES or (kinds == {int} and min(items) > -LARGEST_KEY and max(items) < LARGEST_KEY):
        return list(items)  # as most are, and the most of them
    for position, item in enumerate(items, others):
        check_key(item, position)
    return list(items)


def check_key(key: Any, others: int) -> None:
    """Raise an error for a key that could take long to hash or to find among the ``others``."""
    if isinstance(key, _PLAIN_KEYS) or (type(key) is int and -LARGEST_KEY < key < LARGEST_KEY):
        return
    left = _MOST_KEY_OBJECTS
    waiting = [key]
    while waiting:
        each = waiting.pop()
        left -= 1
        is_tuple = isinstance(each, tuple) and type(each).__hash__ is tuple.__hash__
        if (is_tuple or type(each) is frozenset) and len(each) <= left:
            waiting += each
        elif type(each) in (Global, Call) and left >= 0:
            waiting += getattr(each, "__dict__", {}).values()  # the real object may hash them
        elif left < 0 or is_tuple or type(each) is frozenset:
            raise limit_error(f"keys of at most {_MOST_KEY_OBJECTS} parts", "one of more")
        elif not (isinstance(each, _PLAIN_KEYS) or type(each) in (int, float)):
            raise pickle.UnpicklingError(f"a key of type {type(each).__name__}")
        elif isinstance(each, (str, bytes)) and len(each) > _LONGEST_KEY_PART:
            raise limit_error(
                f"texts of at most {_LONGEST_KEY_PART} characters in keys of several parts", "a longer one"
            )
    if others > _MOST_COLLIDING and type(key) not in (Global, Call):
        raise limit_error(f"at most {_MOST_COLLIDING} keys that are tuples, or large or real numbers", "more")
