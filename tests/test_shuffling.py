"""The order that a seed draws."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.shuffling import shuffled


@dataclass(frozen=True)
class Located:
    path: Path
    number: int


TESTS = [Located(Path(f"test_{module}.py"), number) for module in "abcdef" for number in range(8)]


def test_a_seed_draws_an_order_of_modules_and_of_their_tests() -> None:
    drawn = shuffled(TESTS, "1")
    assert drawn == shuffled(TESTS, "1") != shuffled(TESTS, "2")
    assert drawn != TESTS and set(drawn) == set(TESTS) and len(drawn) == len(TESTS)
    modules = [(path, list(tests)) for path, tests in groupby(drawn, lambda test: test.path)]
    assert len(modules) == 6, "tests of a module are together"
    assert [path for path, _ in modules] != sorted(path for path, _ in modules)
    assert all(tests != sorted(tests, key=lambda test: test.number) for _, tests in modules)
