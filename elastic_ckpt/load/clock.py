"""How long each phase of a load takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall-clock seconds by phase; a phase inside another one counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body as a part of ``phase``."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._inner
        self._inner = outer + spent
