"""The engine that cells in a row load into: the first finds it as it was built, the others as those before left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_kept: dict[str, tuple[Any, Callable[[Any], None]]] = {}


def engine_of(kind: Any, build: Callable[[], Any], close: Callable[[Any], None]) -> Any:
    """The engine of the cell before, if it is of this kind; or one that takes its place. Collective.

    A process has one at a time, since DeepSpeed keeps the process groups of the last one. So a job that builds an
    engine of its own between cells of this function calls :func:`close_kept` first.

    Args:
        kind: equal, as text, for equal engines.
        build: makes one.
        close: frees it.
    """
    key = repr(kind)
    if key not in _kept:
        close_kept()
        _kept[key] = (build(), close)
    return _kept[key][0]


def close_kept() -> None:
    """Free it, if there is one. Collective."""
    while _kept:
        _, (engine, close) = _kept.popitem()
        close(engine)
