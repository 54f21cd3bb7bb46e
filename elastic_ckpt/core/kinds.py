"""Kinds of values: whether what a checkpoint has in a place is what the live run keeps there. Pure.

Optimizers and schedules take any value from a checkpoint, and stumble over one of another kind at a later step: a text
for a learning rate, two betas of three, a class whose call does something else than the method whose name it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from elastic_ckpt.core.values import LeftInFile

NUMBER = "a number"
LIST = "a list"
MAPPING = "a dictionary"
TEXT = "a text"
NOTHING = "nothing"
#: Integers beyond it are none that torch takes.
_LARGEST = 1 << 63
#: The largest count of steps, samples or tokens: torch takes it, and as much again.
LARGEST_COUNT = (1 << 62) - 1


class Strange(NamedTuple):
    """A saved value that is not of the live one's kind."""

    name: str  # of the entry
    expected: str
    found: str


def kind_of(value: Any) -> str:
    """The kind of a value in words; a tensor of one element is a number."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return TEXT
    if isinstance(value, Mapping):
        return MAPPING
    if isinstance(value, (list, tuple)) and not hasattr(value, "numel"):  # of a torch.Size
        return LIST
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return _kind_of_tensor(getattr(value, "dtype", ""), shape)
    return NUMBER if isinstance(value, Real) else f"a {type(value).__name__}"


def _kind_of_tensor(dtype: Any, shape: tuple[int, ...]) -> str:
    is_complex = "complex" in str(dtype)
    is_real = not is_complex and getattr(dtype, "kind", "f") in "biuf"  # of numpy's: not dates, texts, objects
    if math.prod(shape) == 1 and is_real:
        return NUMBER
    what = "complex tensor" if is_complex else "tensor" if is_real else f"tensor of {dtype}"
    return f"a {what} of shape {tuple(shape)}"


def is_plain(value: Any, depth: int = 4) -> bool:
    """Whether a value is a number, a text, nothing, or a list or a dictionary of such."""
    kind = kind_of(value)
    if kind in (LIST, MAPPING):
        members = value.values() if kind == MAPPING else value
        return depth > 0 and all(is_plain(each, depth - 1) for each in members)
    return kind in (NUMBER, TEXT, NOTHING)


def described(value: Any) -> str:
    """A value in an error: its kind, and as much of it as is readable."""
    if isinstance(value, LeftInFile):
        return repr(value)
    try:
        text = repr(value)
    except ValueError:  # numpy prints no date without a unit
        return kind_of(value)
    return f"{kind_of(value)}: {text}"[:200]


def is_count(value: Any) -> bool:
    """Whether a value is a count: an integer from 0 to :data:`LARGEST_COUNT`, and no flag."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def is_finite(value: Any) -> bool:
    """Whether a number, or a tensor of one element, is neither infinite nor larger than any that torch takes."""
    number = number_of(value)
    return abs(number) < _LARGEST if isinstance(number, int) else math.isfinite(number)


def number_of(value: Any) -> Any:
    """The number that a value is, or that a tensor of one element has."""
    if hasattr(value, "elements"):  # of a TensorValue
        return value.elements[0]
    return value.item() if hasattr(value, "item") else value


def strange_value(name: str, live: Any, saved: Any, may_be_infinite: bool = False) -> Strange | None:
    """The first value in ``saved`` of another kind than its counterpart in ``live``; ``None`` if there is none.

    Where the live run has nothing, or an empty list, anything but a function or a class may be. Numbers must be finite
    where the live one is, unless they ``may_be_infinite``.
    """
    was = kind_of(saved)
    now = kind_of(live)
    if now == NOTHING:
        return Strange(name, "a value", described(saved)) if callable(saved) else None
    if isinstance(saved, LeftInFile) and now not in (NUMBER, LIST, MAPPING, TEXT):
        return None  # of an array or object, which is not compared
    if was != now:
        return Strange(name, now, described(saved))
    if now == NUMBER and not (may_be_infinite or is_finite(saved) or not is_finite(live)):
        return Strange(name, "a finite number", described(saved))
    return _strange_part(name, live, saved, may_be_infinite) if now in (LIST, MAPPING) else None


def _strange_part(name: str, live: Any, saved: Any, may_be_infinite: bool) -> Strange | None:
    """The first strange value in a list or dictionary; what the live one lacks is compared with another of its own."""
    if isinstance(saved, Mapping):
        another = next(iter(live.values()), None)
        parts = [(repr(key), live.get(key, another), value) for key, value in saved.items()]
    else:
        last = len(live) - 1
        parts = [(str(at), live[min(at, last)] if live else None, value) for at, value in enumerate(saved)]
    for place, like, value in parts:
        if (strange := strange_value(f"{name}[{place}]", like, value, may_be_infinite)) is not None:
            return strange
    return None
