"""FQNs: the user's renames, what tells which of an optimizer's numbered states is whose, and names of experts. Pure.

Each expert-parallel rank holds some experts of a layer, and its module numbers them from 0. The FQN of an expert's
parameter has the expert's number among all: expert-parallel rank x experts of a rank + its number there, as in the
files of experts (``_save_moe_checkpoint``, engine.py).

AutoEP stacks the weights of a rank's experts along the first dimension of one parameter. Each expert's slice is a
parameter of its own here, with the expert's number at the end of its FQN, as in the files of experts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from elastic_ckpt.core.chunks import PartitionRule, StorageChunk, chunks_of
from elastic_ckpt.core.counts import MOST_DIGITS
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    FROZEN,
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    DerivedTensors,
    Place,
    TensorMetadata,
)
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    WITHOUT_STATES,
    DamagedError,
    LayoutError,
    MismatchError,
    Remedy,
    UnsupportedError,
    listed,
)

RenameRules = Sequence[tuple[str, str]]
#: Rules that ``"rename"`` knows by a name. Megatron Core saves every layer under Transformer Engine's names.
NAME_PRESETS: Mapping[str, RenameRules] = {
    "megatron-core-local": (
        (r"^(.+)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"\1.input_layernorm.\2"),
        (r"^(.+)\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"\1.pre_mlp_layernorm.\2"),
    )
}


def rename(name: str, rules: RenameRules) -> str:
    """Apply to a saved name the first rule whose pattern is found in it."""
    return next((re.sub(pattern, new, name) for pattern, new in rules if re.search(pattern, name)), name)


def rename_saved(metadata: CheckpointMetadata, rules: RenameRules) -> CheckpointMetadata:
    """Apply the user's renames to every name in the checkpoint; :class:`MismatchError` if two would become one.

    A rule may give the module's entry of a trained parameter the name of its master: hooks of a module rename what is
    in its state dict, and not what the optimizer owns. The master counts.
    """
    if not rules:
        return metadata
    metadata = _without_entries_of_masters(metadata, rules)
    tensors = (name for name, _ in metadata.tensors)
    names = dict.fromkeys([*metadata.parameters, *tensors, *metadata.aliases, *metadata.extra_states])
    by_new: dict[str, list[str]] = {}
    for name in names:
        by_new.setdefault(rename(name, rules), []).append(name)
    for new, old in by_new.items():
        if len(old) > 1:
            raise _one_name(metadata, rules, names, new, old)
    used = Counter(_pattern_for(name, rules) for name in names)
    patterns = sorted((pattern for pattern, _ in rules), key=lambda pattern: not used[pattern])
    notes = [f"rename: {used[pattern] or 'no'} names go by {pattern!r}" for pattern in patterns]
    return with_names(metadata, lambda name: rename(name, rules), notes)


def _without_entries_of_masters(metadata: CheckpointMetadata, rules: RenameRules) -> CheckpointMetadata:
    """The metadata without weights that get the name and have the shape of another name's master."""
    entries: dict[Place, str] = {}
    by_new = {rename(name, rules): name for name in metadata.parameters}
    for name in metadata.names(FROZEN):
        owner = by_new.get(rename(name, rules), name)
        master = metadata.tensors.get((owner, MASTER))
        entry = metadata.tensors[name, FROZEN]
        if owner != name and master is not None and master.shard_shapes == entry.shard_shapes:
            entries[name, FROZEN] = owner
    if not entries:
        return metadata
    kept = {place: place for place in metadata.tensors if place not in entries}
    pairs = listed(f"{name} of {owner}" for (name, _), owner in entries.items())
    note = f"rename: entries of the module's state dict, of which the masters count: {pairs}"
    tensors = DerivedTensors(kept, lambda _, old: metadata.tensors[old])
    return replace(metadata, tensors=tensors, notes=(*metadata.notes, note))


def _one_name(
    metadata: CheckpointMetadata, rules: RenameRules, names: Iterable[str], new: str, old: Sequence[str]
) -> MismatchError:
    """The error for rules under which ``old`` saved names become one, and what can be done about them."""
    problem = 'a rule under "rename" gives two saved parameters one name'
    found = listed(old)
    at_fault = {_pattern_for(name, rules) for name in old if rename(name, rules) != name}
    without = {"rename": [list(rule) for rule in rules if rule[0] not in at_fault]}
    if len({metadata.aliases.get(name, name) for name in old}) == 1:
        problem = 'a rule under "rename" gives two names of one saved parameter, which were tied, one name'
        text = "leaves the rule out: each name that the live model has gets the weights"
        remedy = Remedy(text, config=without)
    elif all(sum(_pattern_for(name, rules) == pattern for name in names) == 1 for pattern in at_fault):
        remedy = Remedy("leaves the rule out: the checkpoint has a parameter of that name", config=without)
    else:
        form = '"elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
        remedy = Remedy(f"make the pattern narrower: {form}")
    return MismatchError(problem, None, "one saved name for each live one", found, parameter=new, remedy=remedy)


def _pattern_for(name: str, rules: RenameRules) -> str | None:
    """The pattern of the rule that applies to a saved name; ``None`` if there is none."""
    return next((pattern for pattern, _ in rules if re.search(pattern, name)), None)


def with_names(
    metadata: CheckpointMetadata, new_name: Callable[[str], str], notes: Sequence[str] = ()
) -> CheckpointMetadata:
    every = [*metadata.parameters, *(name for name, _ in metadata.tensors)]
    return replace(
        metadata,
        saved_names={new_name(name): metadata.saved_names.get(name, name) for name in every},
        replicas={(new_name(name), key): tensors for (name, key), tensors in metadata.replicas.items()},
        stages={new_name(name): stages for name, stages in metadata.stages.items()},
        parameters={new_name(name): saved for name, saved in metadata.parameters.items()},
        tensors=DerivedTensors(
            {(new_name(name), key): (name, key) for name, key in metadata.tensors},
            lambda new, old: replace(metadata.tensors[old], name=new[0]),
        ),
        aliases={new_name(name): new_name(target) for name, target in metadata.aliases.items()},
        crc32s={new_name(name): crc32 for name, crc32 in metadata.crc32s.items()},
        extra_states={new_name(name): state for name, state in metadata.extra_states.items()},
        notes=(*metadata.notes, *notes),
    )


#: Per saved group, the name of each member; ``None``: a parameter that no longer trains, whose state is not needed.
Members = Sequence[Sequence[str | None]]


@dataclass(frozen=True)
class ExpertRank:
    """The experts of one expert-parallel rank."""

    rank: int
    local: Mapping[str, int]  # path of a layer -> how many it holds
    stacked: frozenset[str]  # stacked parameters
    crc32s: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # as of ``CheckpointMetadata``


@dataclass(frozen=True)
class NumberedStates:
    """Optimizer states that a checkpoint numbers instead of naming, and the weights saved beside them."""

    path: str  # of the file
    groups: Sequence[Mapping[str, Any]]  # hyperparameters of each saved param group
    #: Per saved group, the shape of each member, ``None`` if no state shows it; of a flat group, of that.
    shapes: Sequence[Sequence[Shape | None]]
    is_flat: bool  # each group is one flat tensor
    weights: Mapping[str, Shape]  # in the order of the module
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied name -> name that holds the data
    buffers: Sequence[str] = ()  # names
    compared: bool = False  # saved values prove the names, because masters are compared with the weights
    experts: ExpertRank | None = None  # whose weights are among these, of a file of one expert-parallel rank
    others: Mapping[str, str] = field(default_factory=dict)  # module entries that are no tensors, and what each is
    #: Of a pipeline: the same of each saved stage, which numbers its own. Weights, aliases and buffers are those of all
    #: stages, tied modules first, then layers by number.
    stages: Sequence[NumberedStates] = ()
    stage: int = 0  # of these states
    may_be_folded: bool = False  # of a pipeline: whether a ``DualPipeVModule`` may have saved it


#: The names, and notes on how they were inferred.
NamedStates = tuple[Members, tuple[str, ...]]
#: Names numbered states; ``None`` if nobody needs them, :class:`MismatchError` if they are needed and unknown.
NameStates = Callable[[NumberedStates], NamedStates | None]


#: Path of the experts in an ``MoE`` layer; the number of an expert follows.
EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
_EXPERT = re.compile(
    rf"(?P<layer>(?:.*\.)?){re.escape(EXPERTS)}(?P<number>\d{{1,{MOST_DIGITS}}})\.(?P<rest>.*)", re.DOTALL
)


@dataclass(frozen=True)
class ExpertName:
    """The name of an expert's tensor."""

    layer: str  # path of the ``MoE`` layer
    number: int  # of the expert
    rest: str  # name within the expert

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
    """One expert's slice of a stacked parameter."""

    name: str  # FQN
    shape: Shape
    range: FlatRange  # its elements of the parameter


def slices(name: str, shape: Sequence[int], experts: Sequence[int]) -> Iterator[ExpertSlice]:
    """The slices of a stacked parameter of this shape with these experts, in order."""
    numel = math.prod(shape[1:])
    for position, expert in enumerate(experts):
        yield ExpertSlice(f"{name}.{expert}", tuple(shape[1:]), FlatRange(position * numel, (position + 1) * numel))


def sliced(
    shapes: Sequence[tuple[str, Sequence[int]]], rules: Iterable[PartitionRule], stacked: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[str, Shape]], list[PartitionRule]]:
    """FQNs and shapes, and how ZeRO partitions each, with the slices of ``stacked`` parameters (experts in each)."""
    found = []
    found_rules = []
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
    expected = "states with one value for each element"
    remedy = (WITHOUT_STATES, AT_ITS_TOPOLOGY)
    return UnsupportedError(problem, None, expected, key, parameter=name, remedy=remedy)


def with_slices(metadata: CheckpointMetadata, with_states: bool = True) -> CheckpointMetadata:
    """``metadata`` whose stacked parameters hold all experts, each in one chunk, with the slices of these instead.

    Raises :class:`LayoutError` for another number of experts, and ``with_states`` :class:`UnsupportedError` for a state
    without slices, which is left out else.
    """
    parameters = dict(metadata.parameters)
    tensors = dict(metadata.tensors)
    keys: dict[str, list[str]] = {}
    for name, key in metadata.tensors:
        keys.setdefault(name, []).append(key)
    for name, number in metadata.stacked.items():
        saved = parameters.pop(name, None)
        if saved is None:
            continue
        if saved.shape[:1] != (number,):
            problem = "this parameter does not have the experts that the model-states file lists"
            expected = f"{counted(number, 'expert')} along its first dimension"
            raise metadata.error(LayoutError, problem, name, expected, f"shape {saved.shape}")
        parts = list(slices(name, saved.shape, range(number)))
        parameters |= {part.name: replace(saved, shape=part.shape) for part in parts}
        for key in keys.get(name, ()):
            tensor = tensors.pop((name, key))
            if tensor.has_own_shape:
                if with_states:
                    raise cannot_slice(key, name)
                continue
            planes = tensor.shape[: len(tensor.shape) - len(saved.shape)]
            for part in parts:
                sources = chunks_of(*_sliced(tensor, part.range, math.prod(saved.shape)))
                tensors[part.name, key] = replace(tensor, name=part.name, shape=(*planes, *part.shape), sources=sources)
    return replace(metadata, parameters=parameters, tensors=tensors)


def _sliced(tensor: TensorMetadata, wanted: FlatRange, numel: int) -> Iterator[StorageChunk]:
    """The chunks of a range of each plane of a tensor, whose planes have ``numel`` elements."""
    (source,) = tensor.sources
    for plane in range(math.prod(tensor.shape) // max(numel, 1)):
        start = plane * numel + wanted.start
        stop = plane * numel + wanted.stop
        to_slice = plane * wanted.numel - start
        for chunk in source.within(start, stop) if wanted.numel else ():
            inside = FlatRange(max(chunk.range.start, start), min(chunk.range.stop, stop))
            skipped = inside.start - chunk.range.start
            code = chunk.code and replace(chunk.code, position=chunk.code.position + skipped)
            byte_offset = chunk.byte_offset + skipped * ITEMSIZE[tensor.dtype]
            elements = FlatRange(inside.start + to_slice, inside.stop + to_slice)
            yield StorageChunk(elements, chunk.file, byte_offset, code)


def with_stacks(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """``metadata`` with stacked parameters instead of their slices.

    Raises :class:`DamagedError` if the slices of one do not have the same states.
    """
    parameters = dict(metadata.parameters)
    tensors = dict(metadata.tensors)
    keys: dict[str, list[str]] = {}
    for part, key in metadata.tensors:
        keys.setdefault(part, []).append(key)
    for name, number in metadata.stacked.items():
        parts = [f"{name}.{expert}" for expert in range(number)]
        saved, *others = ((parameters.pop(part, None), keys.get(part)) for part in parts)
        if others != [saved] * len(others):
            problem = "stacked experts do not all have the same states"
            raise metadata.error(DamagedError, problem, name, None, None)
        if saved[0] is None:  # frozen
            continue
        parameters[name] = replace(saved[0], shape=(number, *saved[0].shape))
        for key in keys[parts[0]]:
            tensors[name, key] = _joined(name, [tensors.pop((part, key)) for part in parts], len(saved[0].shape))
    return replace(metadata, parameters=parameters, tensors=tensors)


def _joined(name: str, parts: Sequence[TensorMetadata], dims: int) -> TensorMetadata:
    """Slices of so many dimensions, one after the other in each plane."""
    first = parts[0]
    number = len(parts)
    planes = first.shape[: len(first.shape) - dims]
    shape = first.shape[len(first.shape) - dims :]
    numel = math.prod(shape)
    chunks: list[StorageChunk] = []
    for expert, part in enumerate(parts):
        for chunk in part.chunks:
            shift = (chunk.range.start // numel * (number - 1) + expert) * numel
            chunks.append(replace(chunk, range=FlatRange(chunk.range.start + shift, chunk.range.stop + shift)))
    chunks.sort(key=lambda chunk: chunk.range.start)
    return replace(first, name=name, shape=(*planes, number, *shape), sources=chunks_of(*chunks))
