"""Optimizer states that a checkpoint numbers instead of naming, as data: what tells which parameter is which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
#: Per saved group, the name of each member; ``None``: a parameter that no longer trains, whose state is not needed.
Members = Sequence[Sequence[str | None]]


@dataclass(frozen=True)
class ExpertRank:
    """The experts of the expert-parallel rank ``rank``: by path of a layer, how many it holds; stacked parameters.

    ``crc32s`` are as in :class:`~elastic_ckpt.core.metadata.CheckpointMetadata`.
    """

    rank: int
    local: Mapping[str, int]
    stacked: frozenset[str]
    crc32s: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class NumberedStates:
    """The numbered states of an optimizer, and the weights saved beside them.

    Attributes:
        path: the file.
        groups: hyperparameters of each saved param group.
        shapes: per saved group, the shape of each member, ``None`` if no state shows it; of a flat group, of that.
        is_flat: whether each group is one flat tensor.
        weights: name -> shape, in the order of the module.
        aliases: tied name -> name that holds the data.
        buffers: names of buffers.
        compared: whether saved values prove the names, because masters are compared with the weights.
        experts: the experts whose weights are among these, of a file of one expert-parallel rank.
    """

    path: str
    groups: Sequence[Mapping[str, Any]]
    shapes: Sequence[Sequence[Shape | None]]
    is_flat: bool
    weights: Mapping[str, Shape]
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: Sequence[str] = ()
    compared: bool = False
    experts: ExpertRank | None = None


#: The names, and notes on how they were inferred.
NamedStates = tuple[Members, tuple[str, ...]]
#: Names numbered states; ``None`` if nobody needs them, :class:`MismatchError` if they are needed and unknown.
NameStates = Callable[[NumberedStates], NamedStates | None]
