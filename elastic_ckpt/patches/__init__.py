"""Opt-in patches of training, and how methods of DeepSpeed are wrapped and unwrapped.

Constructors are watched; what trains and partitions is DeepSpeed's own until one of them is given the option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_ORIGINAL = "_elastic_ckpt_original"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace an attribute of a class or module by ``wrapper``, whose first argument is the original. Idempotent."""
    original = getattr(owner, name)
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _ORIGINAL, original)
    _set(owner, name, wrapped)


def unwrap(owner: Any, name: str) -> bool:
    """Undo :func:`wrap`, unless another wrapper is around ours; returns whether it was undone."""
    wrapped = getattr(owner, name)
    original = getattr(wrapped, _ORIGINAL, None)
    # functools.wraps copies our mark to a wrapper around ours, which is not ours to remove
    if original is None or getattr(wrapped, "__wrapped__", None) is not original:
        return False
    _set(owner, name, original)
    return True


def _set(owner: Any, name: str, function: Any) -> None:
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(function) if is_static else function)


def argument(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of ``function`` gives for one of its parameters; ``None`` if nothing."""
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments.get(name)
