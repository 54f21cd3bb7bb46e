"""What a pickle names, and what it asks to be called: data, until a result is wanted by who may have it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from elastic_ckpt.errors import ElasticCkptError, UnsafePickleError

#: How a :class:`Call` is made: NEWOBJ makes an object that is not initialized; a member of an enum by its name; a
#: tensor that is not dense; one of a class of the user's.
CALL, NEW, MEMBER, TENSOR, SUBCLASS = "call", "new", "member", "tensor", "subclass"
#: What is done with its result.
STATE, ITEMS, PAIRS, MEMBERS = "state", "items", "pairs", "members"
#: ``deepspeed.runtime.zero.config.ZeroStageEnum``, as Python 3.11.0 to 3.11.3 pickle it by name.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


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
    """An object that is made when it is wanted: by calling what, with what, and which state and items it then gets.

    Attributes:
        function: the :class:`Global` that is called, or another call, whose result is.
        args, how: its arguments; CALL, NEW, MEMBER, TENSOR or SUBCLASS.
        steps: of a kind each (STATE, ITEMS, PAIRS or MEMBERS), and with a value: states are lists of one.

    The attributes of an object of a listed class are its own.
    """

    __slots__ = ("__dict__", "args", "function", "how", "steps")
    is_plain_key: ClassVar[bool] = True

    def __init__(self, function: Any, args: tuple[Any, ...] = (), how: str = CALL) -> None:
        self.function, self.args, self.how = function, args, how
        self.steps: list[tuple[str, list[Any]]] = []

    @property
    def name(self) -> str:
        return str(self.function)

    @property
    def is_users(self) -> bool:
        """Whether the user allowed what is called."""
        return type(self.function) is Call or self.function.users is not None

    def __int__(self) -> int:
        return _STAGES[self.args[0]] if self.how == MEMBER else int(self.args[0])

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:  # by which files are compared
        is_short = {int, str}.issuperset(map(type, self.args))
        return f"{self.name}({', '.join(map(repr, self.args))})" if is_short else self.name


class Unmade:
    """An object that is not made, and why; states and items of it are dropped."""

    __slots__ = ("error",)
    is_plain_key: ClassVar[bool] = True

    def __init__(self, error: ElasticCkptError) -> None:
        self.error = error

    def __repr__(self) -> str:
        return str(self.error.found)


class Size(tuple[int, ...]):
    """``torch.Size``."""

    __slots__ = ()

    def __new__(cls, sizes: Any = ()) -> Size:
        if type(sizes) not in (tuple, list) or not {int}.issuperset(map(type, sizes)):
            raise pickle.UnpicklingError("a torch.Size that is no list of integers")
        return super().__new__(cls, sizes)


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
