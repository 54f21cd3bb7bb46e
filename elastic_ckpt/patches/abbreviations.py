"""How an ``argparse`` parser that got flags of ours goes on to read abbreviations of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def abbreviate_as_before(
    parser: argparse.ArgumentParser, is_ours: Callable[[argparse.Action], bool], hidden: str
) -> None:
    """Have abbreviations mean the script's own options; one of ours, only where it is no abbreviation of these.

    Args:
        parser: that has our flags.
        is_ours: whether an action is that of one of our flags.
        hidden: a second spelling, which makes no abbreviation ambiguous.
    """
    options_of = parser._get_option_tuples

    def without_ours(word: str) -> list[Any]:
        found = options_of(word)
        others = [each for each in found if not is_ours(each[0])]
        return others or [each for each in found if each[1] != hidden] or found

    parser._get_option_tuples = without_ours  # type: ignore[method-assign, assignment]
