"""Tensors without data, as ``torch.load`` under ``FakeTensorMode`` makes them, but four times as fast.

Each fake tensor goes through Python dispatch several times, which takes most of the time in which a file of many small
parameters is looked at. Inside :func:`light_tensors`, plain ``meta`` tensors are made of the same storages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_lock = threading.Lock()
_inside = 0
_original: Any = None


@contextmanager
def light_tensors() -> Iterator[None]:
    """While it is open, in any thread, tensors of storages without data are unpickled as ``meta`` tensors.

    What other threads load meanwhile is loaded as always. A version of torch that works otherwise only loses time.
    """
    global _inside, _original  # noqa: PLW0603
    with _lock:
        if _inside == 0:
            _original = getattr(torch._utils, "_rebuild_tensor", None)
            torch._utils._rebuild_tensor = _rebuild
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch._utils._rebuild_tensor = _original


def _rebuild(storage: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """In the place of ``torch._utils._rebuild_tensor``."""
    data = storage._untyped_storage
    if data.device.type != "meta":
        return _original(storage, storage_offset, size, stride)
    with _disable_current_modes():
        empty = torch.empty((0,), dtype=storage.dtype, device="meta")
        return empty.set_(data, storage_offset, size, stride)
