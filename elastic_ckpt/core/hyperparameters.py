"""Hyperparameters that were not read: what stands for them, and how they are refused. Pure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from elastic_ckpt.errors import UnsupportedError, listed

_KEEP_LIVE = '"elastic_checkpoint": {"param_groups": "keep_live"}, which keeps all values of the live groups'


@dataclass(frozen=True)
class LeftInFile:
    """Stands for a tensor, array or object among hyperparameters that is not read; equal to one of the same text."""

    what: str

    def __repr__(self) -> str:
        return self.what


def left_in_file(value: Any) -> Iterator[LeftInFile]:
    """What was not read of a hyperparameter."""
    if isinstance(value, LeftInFile):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(left_in_file, chain(value, value.values())))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from chain.from_iterable(map(left_in_file, value))
    elif isinstance(value, Namespace):
        yield from left_in_file(vars(value))


def refuse_left_in_file(group: Mapping[str, Any], names: Iterable[str], folder: str, remedy: str = _KEEP_LIVE) -> None:
    """Raise :class:`UnsupportedError` for a hyperparameter of a param group that was not read as a whole."""
    for key, value in group.items():
        for each in left_in_file(value):
            problem = f'"{key}" of a param group holds a tensor, an array or an object, which is not supported yet'
            expected = "numbers, strings, dtypes, and collections of these"
            raise UnsupportedError(problem, folder, expected, each, parameter=listed(names), remedy=remedy)
