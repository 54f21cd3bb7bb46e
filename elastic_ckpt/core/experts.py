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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic_ckpt.core.chunks import PartitionRule, StorageChunk, listed
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import ITEMSIZE, CheckpointMetadata, TensorMetadata
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, RESTORE, DamagedError, LayoutError, UnsupportedError

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


def sliced(
    shapes: Sequence[tuple[str, Sequence[int]]], rules: Iterable[PartitionRule], stacked: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[str, tuple[int, ...]]], list[PartitionRule]]:
    """FQNs and shapes, and how ZeRO partitions each, with the slices of ``stacked`` parameters instead of these.

    ``stacked`` has the experts in each.
    """
    found, found_rules = [], []
    for (name, shape), rule in zip(shapes, rules, strict=True):
        parts = list(slices(name, shape, stacked.get(name, ())))
        found += [(part.name, part.shape) for part in parts] or [(name, tuple(shape))]
        found_rules += [
            replace(rule, numel=part.range.numel, shift=rule.shift + part.range.start) for part in parts
        ] or [rule]
    return found, found_rules


def cannot_slice(key: str, name: str) -> UnsupportedError:
    """The error for a state of a stacked parameter that has no part for each expert."""
    problem = f"optimizer state {key!r} is kept for stacked experts as a whole, and cannot be divided among them"
    expected, remedy = "states with one value for each element", f"load_optimizer_states=False, or {AT_ITS_TOPOLOGY}"
    return UnsupportedError(problem, None, expected, key, parameter=name, remedy=remedy)


def stacked_name(name: str) -> str:
    """The stacked parameter of a slice's FQN."""
    return name.rpartition(".")[0]


def with_slices(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """``metadata`` whose stacked parameters hold all experts, each in one chunk, with the slices of these instead.

    Raises :class:`LayoutError` for another number of experts, :class:`UnsupportedError` for a state without slices.
    """
    parameters, tensors = dict(metadata.parameters), dict(metadata.tensors)
    for name, number in metadata.stacked.items():
        saved = parameters.pop(name, None)
        if saved is None:
            continue
        if saved.shape[:1] != (number,):
            problem = "this parameter does not have the experts that the model-states file lists"
            expected = f"{number} experts along its first dimension"
            raise metadata.error(LayoutError, problem, name, expected, f"shape {saved.shape}")
        parts = list(slices(name, saved.shape, range(number)))
        parameters |= {part.name: replace(saved, shape=part.shape) for part in parts}
        for _, key in [each for each in metadata.tensors if each[0] == name]:
            tensor = tensors.pop((name, key))
            if tensor.has_own_shape:
                raise cannot_slice(key, name)
            for part in parts:
                start, elements = part.range.start * ITEMSIZE[tensor.dtype], FlatRange(0, part.range.numel)
                chunks = (replace(each, range=elements, byte_offset=each.byte_offset + start) for each in tensor.chunks)
                sources = listed(*chunks)
                tensors[part.name, key] = replace(tensor, name=part.name, shape=part.shape, sources=sources)
    return replace(metadata, parameters=parameters, tensors=tensors)


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
