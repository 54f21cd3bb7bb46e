"""What the tests of hostile files have in common."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def traced() -> Iterator[None]:
    """Memory is traced all the time: before 3.12.9, Python may crash where it stops to be (python/cpython#128679)."""
    tracemalloc.start()
    yield
    tracemalloc.stop()
