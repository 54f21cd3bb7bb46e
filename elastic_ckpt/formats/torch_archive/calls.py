"""What a pickle names, and what it asks to be called: data, until a result is wanted by who may have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from elastic_ckpt.errors import ElasticCkptError, UnsafePickleError

#: Classes of Python that are made of plain parts, where their result is wanted (:mod:`elastic_ckpt.formats.objects`).
PLAIN_CLASSES = frozenset(
    (
        *("collections.deque", "collections.defaultdict", "types.SimpleNamespace", "builtins.slice", "builtins.range"),
        *("datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone"),
        *("decimal.Decimal", "fractions.Fraction"),
    )
)


@dataclass(frozen=True, slots=True)
class Global:
    """What a name in a pickle stands for; it stays in the tree where a pickle keeps the name, as for ``torch.float32``.

    Attributes:
        name: the qualified name.
        call: a function of this package that takes the arguments of REDUCE or NEWOBJ; ``None``: none does.
        users: the real class or function, where the user allowed it: it is called when its result is wanted.
        error: why neither is there; it is raised when the result is wanted.
        copies: whether the result of ``call`` may be as large as its arguments.
    """

    name: str
    call: Callable[..., Any] | None = None
    users: Any = field(default=None, compare=False)
    error: ElasticCkptError | None = field(default=None, compare=False)
    copies: bool = True

    is_plain_key: ClassVar[bool] = True

    def __repr__(self) -> str:
        return self.name


class Call:
    """A call that is made when its result is wanted: of what, with what, and which state and items that then gets.

    Attributes:
        function: the :class:`Global` that is called, or another call, whose result is.
        args: its arguments.
        is_new: whether NEWOBJ makes the object, without initializing it.
        steps: of a kind each (STATE, ITEMS, PAIRS or MEMBERS), and with a value: states are lists of one.
    """

    __slots__ = ("args", "function", "is_new", "steps")
    is_plain_key: ClassVar[bool] = True

    def __init__(self, function: Any, args: tuple[Any, ...], is_new: bool = False) -> None:
        self.function, self.args, self.is_new = function, args, is_new
        self.steps: list[tuple[str, list[Any]]] = []

    def __repr__(self) -> str:
        return str(self.function)


class Unmade:
    """An object that is not made, and why; states and items of it are dropped."""

    __slots__ = ("error",)
    is_plain_key: ClassVar[bool] = True

    def __init__(self, error: ElasticCkptError) -> None:
        self.error = error

    def __repr__(self) -> str:
        return str(self.error.found)


#: What is done with a :class:`Call`'s result.
STATE, ITEMS, PAIRS, MEMBERS = "state", "items", "pairs", "members"


def described(value: Any) -> str:
    """A value for an error message. The ``repr`` of a few shared tuples can be exponentially long."""
    return repr(value)[:100] if type(value) in (str, Global) else f"an object of type {type(value).__name__}"


def unsafe_error(found: str) -> UnsafePickleError:
    """A name, or a use of it, that is not on the closed list."""
    return UnsafePickleError(
        "this file asks for a Python class or function that is not on the list of safe globals",
        expected="tensors, containers, numbers, strings, and DeepSpeed's own small classes",
        found=f"Unsupported GLOBAL {found}"[:300],
        remedy="if you trust whoever wrote the file: torch.serialization.add_safe_globals([TheClass]) before loading, "
        'or "elastic_checkpoint": {"trust_pickle": true}',
    )
