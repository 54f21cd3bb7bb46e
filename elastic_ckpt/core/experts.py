"""FQNs of experts: in DeepSpeed's ``MoE`` layers, and in those that AutoEP makes. Pure.

Each expert-parallel rank holds some experts of a layer, and its module numbers them from 0. The FQN of an expert's
parameter has the expert's number among all: expert-parallel rank x experts of a rank + its number there, as in the
files of experts (``_save_moe_checkpoint``, engine.py).

AutoEP stacks the weights of a rank's experts along the first dimension of one parameter. Each expert's slice is a
parameter of its own here, with the expert's number at the end of its FQN, as in the files of experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic_ckpt.core.chunks import PartitionRule, StorageChunk, listed
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, TensorMetadata
from elastic_ckpt.errors import RESTORE, DamagedError

#: Path of the experts in an ``MoE`` layer; the number of an expert follows.
EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
_EXPERT = re.compile(rf"(?P<layer>(?:.*\.)?){re.escape(EXPERTS)}(?P<number>\d+)\.(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class ExpertName:
    """The name of an expert's tensor: path of its ``MoE`` layer, number of the expert, name within the expert."""

    layer: str
    number: int
    rest: str

    def __str__(self) -> str:
        return f"{self.layer}{EXPERTS}{self.number}.{self.rest}"

    def on(self, ep_rank: int, local: int) -> ExpertName:
        """The FQN, given the expert-parallel rank that calls it by this name and the number of its experts."""
        return ExpertName(self.layer, ep_rank * local + self.number, self.rest)


def expert_name(name: str) -> ExpertName | None:
    """The parts of a name; ``None``: it is not of an expert's tensor."""
    match = _EXPERT.fullmatch(name) if EXPERTS in name else None  # of most names, a cheaper answer
    return ExpertName(match["layer"], int(match["number"]), match["rest"]) if match else None


class ExpertSlice(NamedTuple):
    """One expert's slice of a stacked parameter: its FQN, its shape, and its elements of the parameter."""

    name: str
    shape: tuple[int, ...]
    range: FlatRange


def slices(name: str, shape: Sequence[int], experts: Sequence[int]) -> Iterator[ExpertSlice]:
    """The slices of a stacked parameter of this shape with these experts, in order."""
    numel = math.prod(shape[1:])
    for position, expert in enumerate(experts):
        yield ExpertSlice(f"{name}.{expert}", tuple(shape[1:]), FlatRange(position * numel, (position + 1) * numel))


def slice_rules(rule: PartitionRule, parts: Iterable[ExpertSlice]) -> list[PartitionRule]:
    """How ZeRO partitions the slices of a stacked parameter, given how it partitions the parameter."""
    return [replace(rule, numel=part.range.numel, shift=rule.shift + part.range.start) for part in parts]


def stacked_name(name: str) -> str:
    """The stacked parameter of a slice's FQN."""
    return name.rpartition(".")[0]


def with_stacks(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """``metadata`` with stacked parameters instead of their slices.

    Raises :class:`DamagedError` if the slices of one do not have the same states.
    """
    parameters, tensors = dict(metadata.parameters), dict(metadata.tensors)
    keys: dict[str, list[str]] = {}
    for part, key in metadata.tensors:
        keys.setdefault(part, []).append(key)
    for name, number in metadata.stacked.items():
        parts = [f"{name}.{expert}" for expert in range(number)]
        saved, *others = ((parameters.pop(part, None), keys.get(part)) for part in parts)
        if others != [saved] * len(others):
            problem = "stacked experts do not all have the same states"
            raise metadata.error(DamagedError, problem, name, None, None, RESTORE)
        if saved[0] is None:  # frozen
            continue
        parameters[name] = replace(saved[0], shape=(number, *saved[0].shape))
        for key in keys[parts[0]]:
            tensors[name, key] = _joined(name, [tensors.pop((part, key)) for part in parts], len(saved[0].shape))
    return replace(metadata, parameters=parameters, tensors=tensors)


def _joined(name: str, parts: Sequence[TensorMetadata], dims: int) -> TensorMetadata:
    """Slices of so many dimensions, one after the other in each row."""
    first, number = parts[0], len(parts)
    rows, shape = first.shape[: len(first.shape) - dims], first.shape[len(first.shape) - dims :]
    numel = math.prod(shape)
    chunks: list[StorageChunk] = []
    for expert, part in enumerate(parts):
        for chunk in part.chunks:
            shift = (chunk.range.start // numel * (number - 1) + expert) * numel
            chunks.append(replace(chunk, range=FlatRange(chunk.range.start + shift, chunk.range.stop + shift)))
    chunks.sort(key=lambda chunk: chunk.range.start)
    return replace(first, name=name, shape=(*rows, number, *shape), sources=listed(*chunks))


def numbers_of_experts(names: Iterable[str]) -> dict[str, frozenset[int]]:
    """Path of each ``MoE`` layer -> the numbers of the experts with tensors among some."""
    found: dict[str, set[int]] = {}
    for each in filter(None, map(expert_name, names)):
        found.setdefault(each.layer, set()).add(each.number)
    return {layer: frozenset(numbers) for layer, numbers in found.items()}
