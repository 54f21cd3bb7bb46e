"""Opt-in patches of training (not of loading), and how methods of DeepSpeed are wrapped and unwrapped."""

from __future__ import annotations

import functools
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
    setattr(owner, name, wrapped)


def unwrap(owner: Any, name: str) -> bool:
    """Undo :func:`wrap`, unless another wrapper is around ours; returns whether it was undone."""
    wrapped = getattr(owner, name)
    original = getattr(wrapped, _ORIGINAL, None)
    # functools.wraps copies our mark to a wrapper around ours, which is not ours to remove
    if original is None or getattr(wrapped, "__wrapped__", None) is not original:
        return False
    setattr(owner, name, original)
    return True
