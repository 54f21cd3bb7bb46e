"""Tests in an order that a seed draws: modules among each other, and the tests of a module; packs of cells follow.

``ELASTIC_CKPT_TEST_SHUFFLE=SEED`` shuffles a run, which says so at its end. What passes only behind another test is seen
to fail; the same seed shows it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

#: The seed, if a run is shuffled.
SEED = os.environ.get("ELASTIC_CKPT_TEST_SHUFFLE", "")


class Located(Protocol):
    """What has a file, such as a test."""

    @property
    def path(self) -> Path:
        """Of the module that it is in."""


T = TypeVar("T", bound=Located)


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """The tests in the order that the seed draws; those of a module stay together, since they share fixtures."""
    random = Random(seed)
    modules: dict[Path, list[T]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    order = list(modules.values())
    random.shuffle(order)
    found: list[T] = []
    for of_module in order:
        random.shuffle(of_module)
        found += of_module
    return found
