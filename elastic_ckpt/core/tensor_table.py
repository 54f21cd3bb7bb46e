"""The tensors of a checkpoint, those of partitioned parameters in closed form. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import Any

from elastic_ckpt.core.chunks import FlatTensors, PartitionedChunks, PartitionRule, listed
from elastic_ckpt.core.metadata import TensorMetadata

Shape = tuple[int, ...]
#: Name and key of a tensor.
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class FlatState:
    """The masters, or a state, of the parameters in a flat tensor: torch dtype in the files, and where they are."""

    dtype: str
    flat: FlatTensors


_NOT_PARTITIONED: tuple[Shape, PartitionRule, Mapping[str, FlatState]] = (), PartitionRule(0, 0), {}


class TensorTable(Mapping[Place, TensorMetadata]):
    """Tensors by name and key; those of flat tensors are made when they are first asked for.

    A model of many experts has a hundred thousand tensors, of which a rank needs few.
    """

    def __init__(self) -> None:
        self._listed: dict[Place, TensorMetadata] = {}
        self._made: dict[Place, TensorMetadata] = {}
        self._partitioned: dict[str, tuple[Shape, PartitionRule, Mapping[str, FlatState]]] = {}

    def add(self, tensors: Mapping[Place, TensorMetadata]) -> None:
        """Add tensors one by one. They take the place of those that are in a flat tensor too."""
        self._listed |= tensors

    def add_flat(
        self,
        shapes: Sequence[tuple[str, Shape]],
        rules: Sequence[PartitionRule],
        states: Mapping[str, FlatState],
    ) -> None:
        """Add the parameters in a flat tensor, and by key the masters and states that are laid out like them."""
        for (name, shape), rule in zip(shapes, rules, strict=True):
            self._partitioned[name] = shape, rule, states

    def __getitem__(self, place: Place) -> TensorMetadata:
        found: TensorMetadata | None = self.get(place)
        if found is None:
            raise KeyError(place)
        return found

    def get(self, place: Place, default: Any = None) -> Any:
        """As of every mapping, but without an exception for each one that is not there."""
        if (found := self._listed.get(place) or self._made.get(place)) is not None:
            return found
        name, key = place
        shape, rule, states = self._partitioned.get(name, _NOT_PARTITIONED)
        if (state := states.get(key)) is None:
            return default
        rows, sources = state.flat.rows, (PartitionedChunks(rule, state.flat),) if rule.numel else listed()
        made = TensorMetadata(name, key, (rows, *shape) if rows > 1 else shape, state.dtype, sources)
        self._made[place] = made
        return made

    def __contains__(self, place: object) -> bool:
        return place in self._listed or self._is_partitioned(place)

    def __iter__(self) -> Iterator[Place]:
        partitioned = ((name, key) for name, (_, _, states) in self._partitioned.items() for key in states)
        return chain(filterfalse(self._listed.__contains__, partitioned), self._listed)

    def __len__(self) -> int:
        partitioned = sum(len(states) for _, _, states in self._partitioned.values())
        return partitioned + len(self._listed) - sum(map(self._is_partitioned, self._listed))

    def _is_partitioned(self, place: object) -> bool:
        found = self._partitioned.get(place[0]) if isinstance(place, tuple) else None
        return found is not None and place[1] in found[2]  # type: ignore[index]


class DerivedTensors(Mapping[Place, TensorMetadata]):
    """Tensors that are made of other places' when they are first asked for.

    Args:
        sources: place -> the place that it is made of.
        make: makes the tensor of a place, given both.
    """

    def __init__(self, sources: Mapping[Place, Place], make: Callable[[Place, Place], TensorMetadata]) -> None:
        self._sources, self._make = sources, make
        self._made: dict[Place, TensorMetadata] = {}

    def __getitem__(self, place: Place) -> TensorMetadata:
        if place not in self._made:
            self._made[place] = self._make(place, self._sources[place])
        return self._made[place]

    def __contains__(self, place: object) -> bool:
        return place in self._sources

    def __iter__(self) -> Iterator[Place]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
