"""Simulated tensor- and pipeline-parallel checkpoints and engines: every shard is cut by torch, element by element."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.checkpoint.affine import sub_param_map
from hypothesis import strategies as st

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import (
    FlatPartition,
    LiveGroup,
    LiveShards,
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
)
from elastic_ckpt.core.shard_specs import ShardSpec, declared_by, layout_of_affine
from elastic_ckpt.core.state_kinds import LiveState
from elastic_ckpt.formats.merging import merge_shards, merge_stages
from elastic_ckpt.sharding.rules import ShardingRules
from tests.simulation import ADAM, BYTES, Cut, Disk, Element, Shape, cuts, each_parameter_cut, fragments_of

#: Keys of what belongs to a parameter -> leading rows.
ROWS = {MASTER: 1, "exp_avg": 1, "averages": 2}
DEGREES = (2, 4, 1, 3)


@dataclass(frozen=True)
class Kind:
    """How ranks of one degree hold a parameter, said in torch."""

    cut: Callable[[torch.Tensor, int, int], torch.Tensor]
    says: tuple[str, ...]
    rule: Mapping[str, Any] = field(default_factory=dict)
    info: Callable[[str], Mapping[str, Any]] = lambda pattern: {}
    dim: int = 0
    stride: int = 1
    parts: tuple[int, ...] = ()


def plain(dim: int) -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    return lambda whole, degree, rank: whole.tensor_split(degree, dim)[rank]


def fused(parts: Sequence[int]) -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    """Each sub-parameter cut on its own."""

    def cut(whole: torch.Tensor, degree: int, rank: int) -> torch.Tensor:
        unit = whole.shape[0] // sum(parts)
        subs = whole.split([unit * part for part in parts])
        return torch.cat([sub.chunk(degree)[rank] for sub in subs])

    return cut


KINDS = {
    "column": Kind(plain(0), ("user", "live", "shapes"), {"kind": "column"}),
    "row": Kind(
        plain(1),
        ("user", "live", "shapes", "declared"),
        {"kind": "row"},
        lambda pattern: {"parameter_with_row_parallelism_patterns": [pattern]},
        dim=1,
    ),
    "halves": Kind(
        fused([1, 1]),
        ("user", "live", "declared", "recorded"),
        {"kind": "column", "sub_parameters": [1, 1]},
        lambda pattern: {"parameter_with_2_sub_params_cat_dim_0": [pattern]},
        stride=2,
        parts=(1, 1),
    ),
    "heads": Kind(
        fused([2, 1, 1]),
        ("user", "declared", "recorded"),
        {"kind": "column", "sub_parameters": [2, 1, 1]},
        lambda pattern: {
            "parameter_with_sub_params": [{"patterns": [pattern], "shape": [(24, 12, 12), -1], "partition_dim": 0}]
        },
        parts=(2, 1, 1),
    ),
    "vocabulary": Kind(
        plain(0),
        ("user", "declared"),
        {"kind": "vocabulary"},
        lambda pattern: {"vocabulary_parameter_patterns": [pattern]},
    ),
    "replicated": Kind(
        lambda whole, degree, rank: whole,
        ("user", "live", "shapes", "declared"),
        {"kind": "replicated"},
        lambda pattern: {"tp_replicated_parameter_patterns": [pattern]},
        dim=-1,
    ),
}
#: Name -> kind; those of buffers and frozen parameters begin with their key.
NAMES = {
    "column.weight": "column",
    "column.bias": "column",
    "row.weight": "row",
    "halves.weight": "halves",
    "halves.bias": "halves",
    "heads.weight": "heads",
    "word_embeddings.weight": "vocabulary",
    "norm.weight": "replicated",
    f"{FROZEN}.row": "row",
    f"{FROZEN}.halves": "halves",
    f"{BUFFER}.column": "column",
    f"{BUFFER}.ids": "replicated",
}
TIED = "word_embeddings.weight"


@dataclass(frozen=True)
class Side:
    """A run: its tensor-parallel degree, what each pipeline stage holds, and how ZeRO cuts that."""

    tp: int
    stages: tuple[tuple[str, ...], ...]
    cuts: tuple[Cut, ...]
    padded: int

    @property
    def dp(self) -> int:
        return self.cuts[0].dp


@dataclass(frozen=True)
class Case:
    """A load: the whole tensors of the run that saves, and both runs."""

    wholes: Mapping[tuple[str, str], torch.Tensor]
    vocabulary: int
    source: Side
    target: Side
    said: Mapping[str, str]
    dtypes: Mapping[str, str]

    def shard(self, name: str, key: str, side: Side, rank: int) -> torch.Tensor:
        """What a rank holds of a tensor; elements that the checkpoint lacks are -1."""
        whole, cut = self.wholes[name, key], KINDS[NAMES[name]].cut
        rows = whole if ROWS.get(key, 1) > 1 else whole.unsqueeze(0)
        if NAMES[name] == "vocabulary":
            padding = torch.full((len(rows), max(side.padded - rows.shape[1], 0), *rows.shape[2:]), -1)
            rows = torch.cat([rows[:, : side.padded], padding], 1)
        return torch.stack([cut(row, side.tp, rank) for row in rows])

    def shape(self, name: str, side: Side, rank: int) -> Shape:
        return tuple(self.shard(name, keys_of(name)[0], side, rank).shape[1:])


def keys_of(name: str) -> tuple[str, ...]:
    prefix = name.partition(".")[0]
    return (prefix,) if prefix in (FROZEN, BUFFER) else tuple(ROWS)


def is_trained(name: str) -> bool:
    return keys_of(name) == tuple(ROWS)


@st.composite
def sides(draw: st.DrawFn, names: Sequence[str], vocabulary: int) -> Side:
    tp, pp = draw(st.sampled_from(DEGREES)), draw(st.sampled_from([1, 2]))
    at = draw(st.integers(1, len(names) - 1))
    order = draw(st.permutations(names))
    stages = [tuple(order)] if pp == 1 else [tuple(order[:at]), tuple(order[at:])]
    if pp == 2 and TIED in names:  # both ends hold a copy of it
        stages = [stage if TIED in stage else (*stage, TIED) for stage in stages]
    style, dp = draw(st.sampled_from(["zero12", "zero3"])), draw(st.sampled_from([2, 3, 1]))
    cut = [replace(draw(cuts(trained(stage) or ("none",), style)), dp=dp) for stage in stages]
    step = tp * draw(st.sampled_from([1, 2, 4]))
    return Side(tp, tuple(stages), tuple(cut), -(-vocabulary // step) * step)


def trained(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(is_trained, names))


@st.composite
def parallel_cases(draw: st.DrawFn) -> Case:
    vocabulary = draw(st.integers(3, 17))
    names = sorted(draw(st.sets(st.sampled_from(sorted(NAMES)), min_size=2, max_size=6)) | {"column.weight"})
    source, target = draw(sides(names, vocabulary)), draw(sides(names, vocabulary))
    if source.tp == target.tp:  # then shards are not cut anew, and another padding is refused
        target = replace(target, padded=source.padded)
    wholes, number = {}, 1
    for name in names:
        size = {"vocabulary": source.padded, "halves": 24, "heads": 48}.get(NAMES[name]) or draw(st.integers(1, 9))
        inner: Shape = () if name.endswith(("bias", "ids")) or name == "norm.weight" else (draw(st.integers(1, 3)),)
        inner = (draw(st.integers(1, 7)), 2) if NAMES[name] == "row" else inner
        for key in keys_of(name):
            shape = (*((2,) if ROWS.get(key, 1) > 1 else ()), size, *inner)
            wholes[name, key] = torch.arange(number, number + math.prod(shape)).view(shape)
            number += math.prod(shape)
    return Case(
        wholes=wholes,
        vocabulary=vocabulary,
        source=source,
        target=target,
        said={name: draw(st.sampled_from(KINDS[NAMES[name]].says)) for name in names},
        dtypes={key: draw(st.sampled_from(["float32", "bfloat16"])) for key in (*ROWS, FROZEN, BUFFER)},
    )


# --- the checkpoint ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A simulated checkpoint."""

    metadata: CheckpointMetadata
    files: list[bytearray]


def save(case: Case) -> Saved:
    """Write the files of the source run, and what reading them would tell."""
    stages, files = [], []
    for stage in range(len(case.source.stages)):
        shards = [save_rank(case, stage, rank) for rank in range(case.source.tp)]
        files += [file for _, disk in shards for file in disk.files]
        stages.append(merge_shards([metadata for metadata, _ in shards]))
    return Saved(merge_stages(stages), files)


def save_rank(case: Case, stage: int, rank: int) -> tuple[CheckpointMetadata, Disk]:
    """The files of one model-parallel rank."""
    side, disk, tensors = case.source, Disk(), {}
    names, cut = side.stages[stage], side.cuts[stage]
    shapes = {name: case.shape(name, side, rank) for name in names}
    for name in names:
        for key in keys_of(name):
            values = case.shard(name, key, side, rank).flatten().tolist()
            disk.numbers |= {(name, key, index): value for index, value in enumerate(values)}
    for dp_rank in range(side.dp if trained(names) else 0):
        file = disk.new_file(3)
        for flat in range(len(cut.flats)):
            for key, rows in ROWS.items():
                part = cut.partitions(flat, key, shapes)[dp_rank]
                for row in range(rows):
                    disk.write(file, [in_row(element, row, shapes) for element in part], BYTES[case.dtypes[key]])
    for name in set(names) - set(trained(names)):
        (key,) = keys_of(name)
        for part in each_parameter_cut([name], key, shapes, side.dp if key == FROZEN else 1):
            disk.write(disk.new_file(1), part, BYTES[case.dtypes[key]])
    for name in names:
        for key in keys_of(name):
            shape = shapes[name] if ROWS.get(key, 1) == 1 else (ROWS[key], *shapes[name])
            tensors[name, key] = disk.tensor(name, key, shape, case.dtypes[key])
    metadata = CheckpointMetadata(
        source=SourceFacts("native", "/ckpt/tag", "tag", 3 if cut.style == "zero3" else 2, side.dp, "0.19.8"),
        files=tuple(SourceFile(f"/ckpt/{stage}/{rank}/{n}.pt", len(raw)) for n, raw in enumerate(disk.files)),
        parameters={name: SavedParameter(shapes[name], 0, (("step", 4.0),)) for name in trained(names)},
        tensors=tensors,
        groups=(dict(ADAM),),
        declared=declared_by(info_of(case, names)),
    )
    return metadata, disk


def in_row(element: Element | None, row: int, shapes: Mapping[str, Shape]) -> Element | None:
    return None if element is None else (element[0], element[1], row * math.prod(shapes[element[0]]) + element[2])


def info_of(case: Case, names: Sequence[str]) -> dict[str, Any]:
    """``universal_checkpoint_info`` of a pipeline stage."""
    info: dict[str, Any] = {"original_vocab_size": case.vocabulary, "affine_map": {"version": 1, "params": {}}}
    for name in names:
        kind, pattern = KINDS[NAMES[name]], f"^{re.escape(name)}$"
        if case.said[name] == "declared":
            for key, patterns in kind.info(pattern).items():
                info[key] = [*info.get(key, []), *patterns]
        elif case.said[name] == "recorded":
            info["affine_map"]["params"][pattern] = recorded(case, name, case.source.tp)
    return info


def recorded(case: Case, name: str, tp: int) -> dict[str, Any]:
    """By DeepSpeed's own code."""
    kind, whole = KINDS[NAMES[name]], case.wholes[name, keys_of(name)[0]]
    sizes = [len(whole) // sum(kind.parts) * part for part in kind.parts]
    return sub_param_map(tuple(whole.shape), sizes, [[size // tp] * tp for size in sizes], 0).to_dict()


# --- the engine -------------------------------------------------------------------------------------------------


def rules_of(case: Case) -> ShardingRules:
    said = [name for name in case.said if case.said[name] == "user"]
    return ShardingRules(tuple(ShardSpec(pattern=re.escape(name), **KINDS[NAMES[name]].rule) for name in said))


def layout_of(case: Case, name: str) -> LiveShards:
    kind, tp, said = KINDS[NAMES[name]], case.target.tp, case.said[name]
    shapes = tuple(case.shape(name, case.target, rank) for rank in range(tp))
    if said == "live":
        return LiveShards(shapes, kind.dim, kind.stride)
    return LiveShards(shapes, layout=layout_of_affine(recorded(case, name, tp)) if said == "recorded" else None)


def engine(case: Case, stage: int, rank: int, dp_rank: int) -> LocalState:
    """One rank of the target run."""
    side = case.target
    names, cut = side.stages[stage], side.cuts[stage]
    shapes = {name: case.shape(name, side, rank) for name in names}
    states = tuple(LiveState(key, "float32", planes=rows) for key, rows in ROWS.items() if key != MASTER)
    flats, fragments = [], []
    for flat, members in enumerate(cut.flats if trained(names) else ()):
        held = cut.partitions(flat, MASTER, shapes)[dp_rank]
        flats.append(FlatPartition(flat, 0, len(held), "float32", members, states=states, scalars=("step",)))
        fragments += fragments_of(flat, held, shapes)
    wholes = []
    for name in names:
        if not is_trained(name):
            part = whole_range(case, stage, rank, dp_rank, name)
            wholes.append(WholeTensor(name, keys_of(name)[0], shapes[name], part, "float32"))
    return LocalState(
        zero_stage=3 if cut.style == "zero3" else 1,
        optimizer="torch.optim.AdamW",
        flats=tuple(flats),
        fragments=tuple(fragments),
        wholes=tuple(wholes),
        groups=(LiveGroup(trained(names), dict(ADAM)),),
        model=ModelLayout(
            RankCoordinates(side.dp, dp_rank, side.tp, rank, len(side.stages), stage),
            layouts={name: layout_of(case, name) for name in names},
            elsewhere=frozenset(case.said) - set(names),
        ),
    )


def whole_range(case: Case, stage: int, rank: int, dp_rank: int, name: str) -> FlatRange:
    """ZeRO-3 cuts frozen parameters, too."""
    numel, side = math.prod(case.shape(name, case.target, rank)), case.target
    if name.startswith(BUFFER) or side.cuts[stage].style != "zero3":
        return FlatRange(0, numel)
    step = -(-numel // side.dp)
    return FlatRange(min(dp_rank * step, numel), min((dp_rank + 1) * step, numel))


def expected(case: Case, stage: int, rank: int, dp_rank: int) -> dict[tuple[str, int, str], list[int]]:
    """What each target of a rank has to hold in the end; -1: it must be left alone."""
    side = case.target
    names, cut, found = side.stages[stage], side.cuts[stage], {}
    shapes = {name: case.shape(name, side, rank) for name in names}
    for flat in range(len(cut.flats) if trained(names) else 0):
        for key, rows in ROWS.items():
            values = {name: case.shard(name, key, side, rank).flatten().tolist() for name in cut.flats[flat]}
            part = cut.partitions(flat, key, shapes)[dp_rank]
            elements = [in_row(element, row, shapes) for row in range(rows) for element in part]
            found[key, flat, ""] = [-1 if e is None else values[e[0]][e[2]] for e in elements]
    for name in names:
        if not is_trained(name):
            mine = whole_range(case, stage, rank, dp_rank, name)
            whole = case.shard(name, keys_of(name)[0], side, rank).flatten().tolist()
            found[keys_of(name)[0], -1, name] = whole[mine.start : mine.stop]
    return found
