"""Whether an optimizer of an engine is in the middle of a step, as while a signal handler runs. Local."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from elastic_ckpt.engines import compat


def is_within_step(engine: Any) -> bool:
    """Whether ``step`` of an engine's optimizer, DeepSpeed's or the one inside it, is running on any thread.

    ``engine.step`` around it is not meant: what it does besides leaves masters and states alone.
    """
    optimizers = [each for each in (engine.optimizer, compat.base_optimizer(engine)) if each is not None]
    return any(any(running is each for each in optimizers) for running in _running("step"))


def _running(method: str) -> Iterator[Any]:
    """The objects of which a method of this name is running."""
    for frame in list(sys._current_frames().values()):
        current: FrameType | None = frame
        while current is not None:
            if current.f_code.co_name == method and "self" in current.f_code.co_varnames[:1]:
                yield current.f_locals.get("self")
            current = current.f_back
