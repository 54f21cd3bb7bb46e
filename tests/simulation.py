"""A simulated checkpoint and a simulated engine, element by element: what tests of the planner and its parts plan on.

Every element of every tensor has a number of its own. The simulated files are bytearrays that hold these numbers,
among headers and padding; the simulated engine is a list of the numbers that have to arrive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import (
    FlatPartition,
    Fragment,
    LiveGroup,
    LocalState,
    ModelLayout,
    RankCoordinates,
    WholeTensor,
)
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.read_plan import LoadPlan, ReadItem
from elastic_ckpt.core.state_kinds import LiveState

Shape = tuple[int, ...]
#: (name, key, index of the element)
Element = tuple[str, str, int]
STATES = ("exp_avg", "exp_avg_sq")
KEYS = (MASTER, *STATES)
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
PADDING = b"\xff"
#: What is in a target before anything is written.
UNTOUCHED = -1
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


# --- a simulated checkpoint -------------------------------------------------------------------------------------


@dataclass
class Disk:
    """Files of numbered elements, and where each element lies."""

    files: list[bytearray] = field(default_factory=list)
    where: dict[Element, tuple[int, int]] = field(default_factory=dict)
    numbers: dict[Element, int] = field(default_factory=dict)

    def new_file(self, header: int) -> int:
        self.files.append(bytearray(b"\xee" * header))
        return len(self.files) - 1

    def write(self, file: int, elements: Iterable[Element | None], itemsize: int) -> None:
        for element in elements:
            if element is None:
                self.files[file] += PADDING * itemsize
                continue
            self.where[element] = (file, len(self.files[file]))
            self.files[file] += self.number(element).to_bytes(itemsize, "little")

    def number(self, element: Element) -> int:
        return self.numbers.setdefault(element, len(self.numbers))

    def tensor(self, name: str, key: str, shape: Shape, dtype: str) -> TensorMetadata:
        """The chunks of one tensor, from where its elements lie."""
        chunks: list[StorageChunk] = []
        for index in range(math.prod(shape)):
            file, offset = self.where[name, key, index]
            last = chunks[-1] if chunks else None
            if last and last.file == file and last.byte_offset + last.range.numel * BYTES[dtype] == offset:
                chunks[-1] = StorageChunk(FlatRange(last.range.start, index + 1), file, last.byte_offset)
            else:
                chunks.append(StorageChunk(FlatRange(index, index + 1), file, offset))
        return TensorMetadata(name, key, shape, dtype, chunks_of(*chunks))


def elements_of(name: str, key: str, shape: Shape) -> list[Element]:
    return [(name, key, index) for index in range(math.prod(shape))]


def flat_group_cut(
    names: Sequence[str], key: str, shapes: Mapping[str, Shape], alignments: Mapping[str, int], dp: int, tail: int
) -> list[list[Element | None]]:
    """ZeRO-1/2: one flat buffer, aligned behind each parameter, padded at the end, cut into equal parts."""
    flat: list[Element | None] = []
    for name in names:
        flat += elements_of(name, key, shapes[name])
        flat += [None] * alignments.get(name, 0)
    flat += [None] * tail
    while len(flat) % dp:
        flat.append(None)
    part = len(flat) // dp
    return [flat[rank * part : (rank + 1) * part] for rank in range(dp)]


def each_parameter_cut(
    names: Sequence[str], key: str, shapes: Mapping[str, Shape], dp: int
) -> list[list[Element | None]]:
    """ZeRO-3: each parameter padded to a multiple of ``dp`` and dealt out in equal chunks."""
    parts: list[list[Element | None]] = [[] for _ in range(dp)]
    for name in names:
        padded: list[Element | None] = [*elements_of(name, key, shapes[name])]
        while len(padded) % dp:
            padded.append(None)
        chunk = len(padded) // dp
        for rank in range(dp):
            parts[rank] += padded[rank * chunk : (rank + 1) * chunk]
    return parts


@dataclass(frozen=True)
class Cut:
    """How one run cuts its parameters: ``flats[i]`` lists the members of flat partition ``i``."""

    style: str
    dp: int
    groups: tuple[tuple[str, ...], ...]
    flats: tuple[tuple[str, ...], ...]
    flat_groups: tuple[int, ...]
    alignments: Mapping[str, int]
    tail: int

    def partitions(self, flat: int, key: str, shapes: Mapping[str, Shape]) -> list[list[Element | None]]:
        """What each rank holds of one flat tensor, element by element; ``None`` is padding."""
        if self.style == "zero3":
            return each_parameter_cut(self.flats[flat], key, shapes, self.dp)
        return flat_group_cut(self.flats[flat], key, shapes, self.alignments, self.dp, self.tail)


@dataclass(frozen=True)
class Case:
    """One random load."""

    shapes: Mapping[str, Shape]
    wholes: Mapping[tuple[str, str], Shape]
    metadata: CheckpointMetadata
    disk: Disk
    target: Cut
    restored: frozenset[str]
    missing: frozenset[str]
    extra: frozenset[str]


shapes_of_parameters = st.lists(st.sampled_from([3, 5, 7, 2, 1, 0]), max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, names: Sequence[str], style: str) -> Cut:
    order = draw(st.permutations(names))
    groups = [tuple(part) for part in draw(splits(order, 3))]
    pieces = [(group, tuple(part)) for group, members in enumerate(groups) for part in draw(splits(members, 4))]
    if style != "zero3":
        pieces = list(enumerate(groups))
    return Cut(
        style=style,
        dp=draw(st.sampled_from([2, 3, 5, 4, 1])),
        groups=tuple(groups),
        flats=tuple(members for _, members in pieces),
        flat_groups=tuple(group for group, _ in pieces),
        alignments={name: draw(st.integers(0, 3)) for name in names} if draw(st.booleans()) else {},
        tail=draw(st.integers(0, 5)),
    )


@st.composite
def splits(draw: st.DrawFn, members: Sequence[str], most: int) -> list[list[str]]:
    """Cut a list into 1 to ``most`` runs, none empty."""
    inner = draw(st.permutations(range(1, len(members))))[: draw(st.sampled_from([*range(1, most), 0]))]
    bounds = [0, *sorted(inner), len(members)]
    return [list(members[a:b]) for a, b in pairwise(bounds)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = {
        f"p{number}": draw(shapes_of_parameters) for number in range(draw(st.sampled_from([4, 6, 8, 2, 1, 3, 5, 7])))
    }
    names = list(shapes)
    role = {name: draw(st.sampled_from(["both"] * 8 + ["live", "saved"])) for name in names}
    saved = [name for name in names if role[name] != "live"] or names
    live = [name for name in names if role[name] != "saved"] or names
    wholes = {
        (f"w{number}", draw(st.sampled_from([BUFFER, FROZEN]))): draw(shapes_of_parameters)
        for number in range(draw(st.integers(0, 3)))
    }
    dtypes = {key: draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"])) for key in KEYS}
    dtypes |= {BUFFER: "int64", FROZEN: "bfloat16"}
    style = draw(st.sampled_from(["zero12", "zero3", "universal"]))
    source = draw(cuts(saved, style))
    disk = Disk()
    headers = st.integers(0, 9)
    if style == "universal":
        for name in saved:
            for key in KEYS:
                disk.write(disk.new_file(draw(headers)), elements_of(name, key, shapes[name]), BYTES[dtypes[key]])
    else:
        for rank in range(source.dp):
            file = disk.new_file(draw(headers))
            for flat in range(len(source.flats)):
                for key in KEYS:
                    disk.files[file] += b"\xee" * draw(st.integers(0, 2))
                    disk.write(file, source.partitions(flat, key, shapes)[rank], BYTES[dtypes[key]])
    for (name, key), shape in wholes.items():
        parts = each_parameter_cut([name], key, {name: shape}, source.dp if key == FROZEN else 1)
        for part in parts:
            disk.write(disk.new_file(draw(headers)), part, BYTES[dtypes[key]])
    described = [(name, key, shapes[name]) for name in saved for key in KEYS]
    described += [(name, key, shape) for (name, key), shape in wholes.items()]
    group_of = {name: number for number, group in enumerate(source.groups) for name in group}
    metadata = CheckpointMetadata(
        source=SourceFacts("native", "/ckpt/tag", "tag", 3 if style == "zero3" else 2, source.dp, "0.19.8"),
        files=tuple(SourceFile(f"/ckpt/tag/{number}.pt", len(raw)) for number, raw in enumerate(disk.files)),
        parameters={name: SavedParameter(shapes[name], group_of[name], (("step", 4.0),)) for name in saved},
        tensors={(name, key): disk.tensor(name, key, shape, dtypes[key]) for name, key, shape in described},
        groups=tuple(dict(ADAM) for _ in source.groups),
    )
    return Case(
        shapes=shapes,
        wholes=wholes,
        metadata=metadata,
        disk=disk,
        target=draw(cuts(live, draw(st.sampled_from(["zero12", "zero3"])))),
        restored=frozenset(saved) & frozenset(live),
        missing=frozenset(live) - frozenset(saved),
        extra=frozenset(saved) - frozenset(live),
    )


# --- a simulated engine -----------------------------------------------------------------------------------------


def fragments_of(flat: int, held: Sequence[Element | None], shapes: Mapping[str, Shape]) -> list[Fragment]:
    """The pieces of parameters in one flat partition: runs of one name."""
    found: list[Fragment] = []
    for position, element in enumerate(held):
        if element is None:
            continue
        name, _, index = element
        last = found[-1] if found else None
        if last and last.name == name and last.range.stop == index:
            found[-1] = dataclasses.replace(last, range=FlatRange(last.range.start, index + 1))
        else:
            found.append(Fragment(name, shapes[name], FlatRange(index, index + 1), flat, position))
    return found


def flat_partition(
    index: int,
    group: int,
    numel: int,
    dtype: str,
    members: tuple[str, ...],
    states: Sequence[str] = STATES,
    scalars: Sequence[str] = ("step",),
) -> FlatPartition:
    """A flat partition with elementwise states."""
    kinds = tuple(LiveState(key, dtype) for key in states)
    return FlatPartition(index, group, numel, dtype, members, states=kinds, scalars=tuple(scalars))


def engine_of(case: Case, rank: int) -> LocalState:
    target, flats, fragments, wholes = case.target, [], [], []
    for flat, members in enumerate(target.flats):
        held = target.partitions(flat, MASTER, case.shapes)[rank]
        flats.append(flat_partition(flat, target.flat_groups[flat], len(held), "float32", members))
        fragments += fragments_of(flat, held, case.shapes)
    for (name, key), shape in case.wholes.items():
        held_indices = [element[2] for element in whole_part(case, name, key, rank)]
        held_range = FlatRange(held_indices[0], held_indices[-1] + 1) if held_indices else FlatRange(0, 0)
        wholes.append(WholeTensor(name, key, shape, held_range, "int64" if key == BUFFER else "float32"))
    return LocalState(
        zero_stage=3 if target.style == "zero3" else 1,
        optimizer="torch.optim.AdamW",
        flats=tuple(flats),
        fragments=tuple(fragments),
        wholes=tuple(wholes),
        groups=tuple(LiveGroup(names, dict(ADAM)) for names in target.groups),
        model=ModelLayout(RankCoordinates(target.dp, rank)),
    )


def whole_part(case: Case, name: str, key: str, rank: int) -> list[Element]:
    """A frozen parameter is cut by ZeRO-3; buffers and the other stages keep everything on every rank."""
    cut = case.target.style == "zero3" and key == FROZEN
    parts = each_parameter_cut([name], key, {name: case.wholes[name, key]}, case.target.dp if cut else 1)
    return [element for element in parts[rank if cut else 0] if element is not None]


def expected_targets(case: Case, rank: int) -> dict[tuple[str, int, str], list[int]]:
    """The number that each element of each target has to receive, or :data:`UNTOUCHED`."""
    expected: dict[tuple[str, int, str], list[int]] = {}
    for flat, members in enumerate(case.target.flats):
        for key in KEYS if case.restored & set(members) else (MASTER,):
            held = case.target.partitions(flat, key, case.shapes)[rank]
            expected[key, flat, ""] = [
                case.disk.number(element) if element is not None and element[0] in case.restored else UNTOUCHED
                for element in held
            ]
    for name, key in case.wholes:
        expected[key, -1, name] = [case.disk.number(element) for element in whole_part(case, name, key, rank)]
    return expected


def written(items: Iterable[ReadItem], numel: int, files: Sequence[bytearray]) -> list[int]:
    """What some items write into a target; nothing may be written twice, nor read beyond the end of a file."""
    values = [UNTOUCHED] * numel
    for item in items:
        itemsize = BYTES[item.dtype]
        for row in range(item.rows):
            first = item.byte_offset + row * item.file_stride * itemsize
            raw = bytes(files[item.file][first : first + item.numel * itemsize])
            assert len(raw) == item.numel * itemsize, f"{item} reads beyond the end of the file"
            start = item.target_offset + row * item.target_stride
            there = slice(start, start + item.numel)
            assert values[there] == [UNTOUCHED] * item.numel, f"{item} writes an element a second time"
            values[there] = np.frombuffer(raw, dtype=f"<u{itemsize}").tolist()
    return values


def simulate(plan: LoadPlan, files: Sequence[bytearray]) -> dict[tuple[str, int, str], list[int]]:
    """Execute the items of a plan on lists."""
    items: dict[int, list[ReadItem]] = {}
    for item in plan.reads.items:
        items.setdefault(item.target, []).append(item)
    named = {
        (target.key, target.flat, target.name): written(items.get(number, ()), target.numel, files)
        for number, target in enumerate(plan.reads.targets)
    }
    assert len(named) == len(plan.reads.targets), "two targets are the same tensor"
    return named


def names_of(plan: LoadPlan, role: str, what: str) -> tuple[str, ...]:
    """All names of one role with one outcome."""
    return tuple(
        name for outcome in plan.outcomes if (outcome.role, outcome.what) == (role, what) for name in outcome.names
    )


def saved(
    shapes: Mapping[str, Shape],
    *,
    groups: Mapping[str, int] | None = None,
    hyperparameters: Sequence[Mapping[str, Any]] = (ADAM,),
    states: Sequence[str] = STATES,
    scalars: Mapping[str, Sequence[tuple[str, float]]] | None = None,
    dtype: str = "float32",
    wholes: Mapping[tuple[str, str], tuple[Shape, str]] | None = None,
    **more: Any,
) -> CheckpointMetadata:
    """A checkpoint in one file, everything whole."""
    disk = Disk()
    file = disk.new_file(5)
    tensors = {}
    for name, shape in shapes.items():
        for key in (MASTER, *states):
            disk.write(file, elements_of(name, key, shape), BYTES[dtype])
            tensors[name, key] = disk.tensor(name, key, shape, dtype)
    for (name, key), (shape, whole_dtype) in (wholes or {}).items():
        sources = chunks_of(StorageChunk(FlatRange(0, math.prod(shape)), file, len(disk.files[file])))
        disk.files[file] += bytes(8 * math.prod(shape))
        tensors[name, key] = TensorMetadata(name, key, shape, whole_dtype, sources)
    default_scalars = (("step", 4.0),) if states else ()
    return CheckpointMetadata(
        source=SourceFacts("native", "/ckpt/tag", "tag", 2, 1, "0.19.8"),
        files=(SourceFile("/ckpt/tag/states.pt", len(disk.files[file])),),
        parameters={
            name: SavedParameter(shape, (groups or {}).get(name, 0), tuple((scalars or {}).get(name, default_scalars)))
            for name, shape in shapes.items()
        },
        tensors=tensors,
        groups=tuple(hyperparameters),
        **more,
    )


def live(
    shapes: Mapping[str, Shape],
    *,
    groups: Sequence[Sequence[str]] | None = None,
    states: Sequence[str] = STATES,
    scalar_keys: Sequence[str] = ("step",),
    dtype: str = "float32",
    wholes: Mapping[tuple[str, str], tuple[Shape, str]] | None = None,
) -> LocalState:
    """An engine on one rank, ZeRO-1/2."""
    flats, fragments = [], []
    groups = groups or [list(shapes)]
    for number, names in enumerate(groups):
        position = 0
        for name in names:
            numel = math.prod(shapes[name])
            fragments.append(Fragment(name, shapes[name], FlatRange(0, numel), number, position))
            position += numel
        flats.append(flat_partition(number, number, position, dtype, tuple(names), states, scalar_keys))
    return LocalState(
        zero_stage=1,
        optimizer="torch.optim.AdamW",
        flats=tuple(flats),
        fragments=tuple(fragments),
        wholes=tuple(
            WholeTensor(name, key, shape, FlatRange(0, math.prod(shape)), whole_dtype)
            for (name, key), (shape, whole_dtype) in (wholes or {}).items()
        ),
        groups=tuple(LiveGroup(tuple(names), dict(ADAM)) for names in groups),
    )


def with_extents(metadata: CheckpointMetadata, name: str, key: str, *pieces: tuple[int, int]) -> CheckpointMetadata:
    """The same checkpoint, with other stretches of one tensor in it."""
    tensor = metadata.tensors[name, key]
    base = tensor.chunks[0].byte_offset
    chunks = (StorageChunk(FlatRange(a, b), 0, base + a * BYTES[tensor.dtype]) for a, b in pieces)
    changed = dataclasses.replace(tensor, sources=chunks_of(*chunks))
    return dataclasses.replace(metadata, tensors={**metadata.tensors, (name, key): changed})


TWO = {"a.weight": (2, 5), "b.weight": (3,)}


def without_states(metadata: CheckpointMetadata, name: str) -> CheckpointMetadata:
    """The same checkpoint, with no optimizer state of one parameter."""
    tensors = {where: tensor for where, tensor in metadata.tensors.items() if where[0] != name or where[1] == MASTER}
    parameters = {**metadata.parameters, name: dataclasses.replace(metadata.parameters[name], scalars=())}
    return dataclasses.replace(metadata, tensors=tensors, parameters=parameters)


def unpartitioned(metadata: CheckpointMetadata) -> CheckpointMetadata:
    """The same checkpoint, as a run without ZeRO would have saved it."""
    return dataclasses.replace(metadata, source=dataclasses.replace(metadata.source, zero_stage=0))
