"""Scalar states and hyperparameters beside plain ones: small tensors, what ranks differ in, what was not read. Pure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from elastic_ckpt.errors import UnsupportedError, listed

_KEEP_LIVE = '"elastic_checkpoint": {"param_groups": "keep_live"}, which keeps all values of the live groups'


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TensorValue:
    """A small tensor, its elements in row-major order; without dimensions, it equals its number."""

    dtype: str
    shape: tuple[int, ...]
    elements: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TensorValue):
            return (self.shape, self.elements) == (other.shape, other.elements)
        return self.shape == () and bool(self.elements[0] == other)

    def __hash__(self) -> int:
        return hash(self.elements if self.shape else self.elements[0])

    def __float__(self) -> float:
        return float(self.elements[0])

    def __int__(self) -> int:
        return int(self.elements[0])

    def __repr__(self) -> str:
        shown, shape = (str(self.elements[0]), "") if self.shape == () else (str(self.elements), f", {self.shape}")
        return f"tensor({shown}, {self.dtype}{shape})"


@dataclass(frozen=True, slots=True, repr=False)
class PerRank:
    """A value in which ranks differ: pairs of a file, as :class:`StorageChunk` counts them, and its value."""

    by_file: tuple[tuple[int, Any], ...]

    @property
    def values(self) -> list[Any]:
        """The values, each once."""
        return list({repr(value): value for _, value in self.by_file}.values())

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.values))} (by rank)"


def merged(parts: Iterable[tuple[range, Mapping[str, Any]]]) -> dict[str, Any]:
    """The values of several ranks by key, each with the files that it saved, the first of which is file 0 to itself."""
    parts = list(parts)
    found: dict[str, Any] = {}
    for key in dict.fromkeys(chain.from_iterable(values for _, values in parts)):
        every = [(files, values[key]) for files, values in parts if key in values]
        (_, first), *others = every
        is_one = len(every) == len(parts) and not isinstance(first, PerRank)
        is_one = is_one and all(value is first or repr(value) == repr(first) for _, value in others)
        found[key] = first if is_one else PerRank(tuple(chain.from_iterable(_by_file(*each) for each in every)))
    return found


def _by_file(files: range, value: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(value, PerRank):
        yield from ((files.start + file, each) for file, each in value.by_file)
    else:
        yield from ((file, value) for file in files)


def moved(values: Mapping[str, Any], files: int) -> dict[str, Any]:
    """The values where ``files`` more files come before those of their ranks."""
    return {
        key: PerRank(tuple(_by_file(range(files, files), value))) if isinstance(value, PerRank) else value
        for key, value in values.items()
    }


def of_rank(values: Mapping[str, Any], file: int) -> dict[str, Any]:
    """The values that the rank with this file saved."""
    every = ((key, value.by_file if isinstance(value, PerRank) else ((file, value),)) for key, value in values.items())
    return {key: each for key, found in every for number, each in found if number == file}


def common(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that all ranks have."""
    return {key: value for key, value in values.items() if not isinstance(value, PerRank)}


def differing(values: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys in whose values ranks differ."""
    found = (key for each in values for key, value in each.items() if isinstance(value, PerRank))
    return sorted(dict.fromkeys(map(str, found)))


def numbers(value: Any) -> Sequence[float]:
    """The numbers of a scalar state, on all ranks; none of what is no number."""
    if isinstance(value, PerRank):
        return [number for each in value.values for number in numbers(each)]
    if isinstance(value, TensorValue):
        return [each for each in value.elements if isinstance(each, int | float)]
    return [value] if isinstance(value, int | float) else []


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
