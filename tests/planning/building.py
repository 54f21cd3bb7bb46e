"""Checkpoints and engines of one flat partition, planned, and read from real files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastic_ckpt.core.chunks import BlockCode, StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LiveGroup, LocalState, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import (
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan, TargetTensor
from elastic_ckpt.core.state_kinds import BlockFormat, LiveState
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import execute
from elastic_ckpt.io.staging import ReadStats
from tests.planning.partitions import ITEMSIZE, SIGNED, Disk, Partition

Shape = tuple[int, ...]


Tensors = dict[tuple[str, str], TensorMetadata]


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


UNTOUCHED = 99


FOUR = BlockFormat(4, "absmax1", SIGNED[0])


RANDOM = np.random.default_rng(0)


def chunk(part: Partition, first: int, numel: int, position: int) -> StorageChunk:
    """Elements of a tensor that lie in a partition from ``position`` on."""
    code = None if part.format is None else BlockCode(part.format, position, part.scales_offset)
    offset = part.byte_offset + position * ITEMSIZE[part.dtype]
    return StorageChunk(FlatRange(first, first + numel), part.file, offset, code)


def tensor_in(part: Partition, name: str, key: str, shape: Shape, position: int = 0) -> TensorMetadata:
    """A tensor that lies whole in one partition."""
    return TensorMetadata(name, key, shape, part.dtype, chunks_of(chunk(part, 0, math.prod(shape), position)))


def numbers(numel: int) -> NDArray[np.float32]:
    return RANDOM.normal(size=numel).astype(np.float32)


def coded(disk: Disk, numel: int, blocks: BlockFormat = FOUR) -> Partition:
    """A partition of random codes, each block at a scale of its own."""
    count = blocks.blocks(numel)
    return disk.coded(RANDOM.integers(0, 256, numel), RANDOM.permutation(count) + 1.0, blocks)


def catalog_of(
    disk: Disk, shapes: Mapping[str, Shape], states: Tensors, replicated: Sequence[ReplicatedState] = ()
) -> CheckpointMetadata:
    """A checkpoint of these states, and of masters that lie whole."""
    masters = {
        (name, MASTER): tensor_in(disk.raw(numbers(math.prod(s))), name, MASTER, s) for name, s in shapes.items()
    }
    return CheckpointMetadata(
        source=SourceFacts("native", "/ckpt/tag", "tag", 2, 1, "0.19.8"),
        files=tuple(SourceFile(f"/ckpt/tag/{number}", len(raw)) for number, raw in enumerate(disk.files)),
        parameters={
            name: SavedParameter(shape, 0, (("step", 4.0),), tuple(replicated)) for name, shape in shapes.items()
        },
        tensors={**masters, **states},
        groups=(dict(ADAM),),
    )


def cut(shapes: Mapping[str, Shape], step: int, rank: int) -> tuple[Fragment, ...]:
    """What one rank holds of parameters that lie one behind the other in a flat buffer, cut into equal parts."""
    fragments, position = [], 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        first, last = max(position, rank * step), min(position + numel, (rank + 1) * step)
        if first < last:
            held = FlatRange(first - position, last - position)
            fragments.append(Fragment(name, shape, held, 0, first - rank * step))
        position += numel
    return tuple(fragments)


def engine_of(
    shapes: Mapping[str, Shape],
    states: Sequence[LiveState],
    *,
    numel: int | None = None,
    dp: int = 1,
    rank: int = 0,
    fragments: Sequence[Fragment] | None = None,
) -> LocalState:
    """One flat partition on one rank; ``numel`` is that of the partition."""
    numel = numel or sum(map(math.prod, shapes.values()))
    flat = FlatPartition(0, 0, numel, "float32", tuple(shapes), False, tuple(states), ("step",))
    return LocalState(
        zero_stage=1,
        optimizer="an.Optimizer",
        flats=(flat,),
        fragments=tuple(fragments if fragments is not None else cut(shapes, numel, rank)),
        wholes=(),
        groups=(LiveGroup(tuple(shapes), dict(ADAM)),),
        model=ModelLayout(RankCoordinates(dp, rank)),
    )


def memory_of(plan: ReadPlan) -> list[torch.Tensor]:
    """A tensor for each target, with its gaps filled as an engine does it."""
    tensors = [torch.full((target.numel,), UNTOUCHED, dtype=getattr(torch, target.dtype)) for target in plan.targets]
    for target, tensor in zip(plan.targets, tensors, strict=True):
        for gap in target.gaps:
            tensor[gap.start : gap.stop] = target.fill
    return tensors


def carry_out(
    plan: ReadPlan, disk: Disk, folder: Path, tensors: Sequence[torch.Tensor], options: ReadOptions | None = None
) -> ReadStats:
    for number, raw in enumerate(disk.files):
        (folder / str(number)).write_bytes(raw)
    files = tuple(SourceFile(str(folder / str(number)), len(raw)) for number, raw in enumerate(disk.files))
    return execute(replace(plan, files=files), tensors, options or ReadOptions())


def loaded(plan: LoadPlan, disk: Disk, folder: Path) -> dict[str, NDArray[Any]]:
    """What is in the targets afterwards, of a plan with one flat partition."""
    tensors = memory_of(plan.reads)
    carry_out(plan.reads, disk, folder, tensors)
    assert len({target.key for target in plan.reads.targets}) == len(plan.reads.targets)
    return {target.key: tensor.numpy() for target, tensor in zip(plan.reads.targets, tensors, strict=True)}


def target_of(plan: LoadPlan, key: str) -> TargetTensor:
    (found,) = [target for target in plan.reads.targets if target.key == key]
    return found


def elements(ranges: Sequence[FlatRange]) -> list[int]:
    return [position for held in ranges for position in range(held.start, held.stop)]


def decoded(codes: NDArray[np.uint8], scales: NDArray[np.float32], blocks: BlockFormat) -> NDArray[np.float32]:
    """One row."""
    return np.float32(blocks.codebook.values)[codes] * np.repeat(scales, blocks.numel)[: len(codes)]
