"""Optimizer states of universal checkpoints that DeepSpeed's converter does not know: 8-bit ones, and shared ones.

:mod:`elastic_ckpt.formats.universal_states` describes the files. Codes and scales are copied as bytes: blocks keep the
borders that ZeRO gave them, which are recorded beside the scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic_ckpt.core.chunks import QuantizedRun
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, ReplicatedState
from elastic_ckpt.core.read_plan import SCALE_DTYPE, ReadItem, ReadPlan, TargetTensor, in_file_order
from elastic_ckpt.core.state_kinds import COMPANIONS, BlockFormat, Codebook
from elastic_ckpt.core.values import common, differing
from elastic_ckpt.errors import MismatchError, Remedy, UnsupportedError
from elastic_ckpt.formats.universal_blocks import BLOCK_NUMEL, RUNS
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import execute
from elastic_ckpt.planning.param_groups import UPDATE_NORM
from elastic_ckpt.tools.logical import LogicalReader, LogicalTensor, plain

_STEP = "step"


@dataclass(frozen=True)
class QuantizedState:
    """A quantized state to be written: its runs, and from where the scales of each come (file, byte offset)."""

    logical: LogicalTensor
    blocks: BlockFormat
    items: tuple[ReadItem, ...]  # of the codes
    runs: tuple[QuantizedRun, ...]
    scales: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its codes."""
        return self.logical.numel


def quantized_states(reader: LogicalReader, tensors: Iterable[LogicalTensor]) -> dict[tuple[str, str], QuantizedState]:
    """The quantized ones among some tensors, whose flat tensors are numbered in the order of these."""
    origins: dict[tuple[int, int], int] = {}
    found = {}
    for logical in tensors:
        tensor = reader.metadata.tensors[logical.name, logical.key]
        if tensor.blocks is None:
            continue
        items, scale = reader.items_of(logical, FlatRange(0, logical.numel))
        if scale is not None:
            problem = f"{logical.key} is quantized, and would have to be averaged or added up over ranks"
            remedy = Remedy("takes the first rank's", config={"replicated_params": "first"})
            both = "a state of plain values", "8-bit codes"
            folder = reader.metadata.source.folder
            raise MismatchError(problem, folder, *both, parameter=logical.name, remedy=remedy)
        runs = []
        scales = []
        for item in _consecutive(items):
            code = item.code
            if code is None or code.format != tensor.blocks:
                problem = f"tensor-parallel ranks saved {logical.key} of this parameter in different 8-bit blocks"
                raise UnsupportedError(problem, reader.metadata.source.folder, parameter=logical.name)
            file, byte_offset, _ = code.scales_of(item.numel, item.file)
            origin = origins.setdefault((file, code.scales_offset), len(origins))
            stride = item.target_stride or item.numel
            run = QuantizedRun(item.target_offset, item.numel, item.rows, stride, origin, code.position)
            runs.append(run)
            scales.append((file, byte_offset))
        found[logical.name, logical.key] = QuantizedState(
            logical, tensor.blocks, tuple(items), tuple(runs), tuple(scales)
        )
    return found


def _consecutive(items: Iterable[ReadItem]) -> Iterable[ReadItem]:
    """Items whose rows follow each other in the file; others row by row."""
    for item in items:
        if item.rows == 1 or item.file_stride == item.numel:
            yield item
        else:
            yield from (item.row(number) for number in range(item.rows))


def read_quantized(state: QuantizedState, reader: LogicalReader) -> tuple[torch.Tensor, dict[str, Any]]:
    """The codes of a state, and what is in the file of its scales. Thread-safe."""
    logical = state.logical
    counts = [len(run.blocks(state.blocks.numel)) for run in state.runs]
    codes = torch.empty(logical.shape, dtype=torch.uint8)
    scales = torch.empty(sum(counts), dtype=torch.float32)
    copies = [replace(item, code=None) for item in state.items]
    at = 0
    for (file, byte_offset), count in zip(state.scales, counts, strict=True):
        copies.append(ReadItem(file, byte_offset, 1, at, count, SCALE_DTYPE))
        at += count
    targets = (
        TargetTensor(logical.key, 0, logical.name, codes.numel(), "uint8"),
        TargetTensor(state.blocks.scales, 0, logical.name, scales.numel(), SCALE_DTYPE),
    )
    if copies:
        execute(
            ReadPlan(reader.metadata.files, targets, in_file_order(copies)), [codes.view(-1), scales], reader.options
        )
    rows = [(run.start, run.numel, run.rows, run.stride, run.origin, run.position) for run in state.runs]
    runs = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1)
    return codes, {"param": scales, BLOCK_NUMEL: state.blocks.numel, RUNS: runs}


@dataclass(frozen=True)
class SharedStates:
    """What parameters have in common: tensors that are never sharded, codebooks, and scalars beside the step."""

    for_all: Mapping[str, Any]  # of every parameter with states, by key
    own: Mapping[str, Mapping[str, Any]]  # by parameter, where these differ


def shared_states(metadata: CheckpointMetadata, options: ReadOptions) -> SharedStates:
    """The states of whole partitions and the scalars, of each parameter or of all."""
    stateful = [name for name, saved in metadata.parameters.items() if metadata.keys_by_name.get(name) or saved.scalars]
    values: dict[str, dict[str, tuple[Any, Any]]] = {}  # by key and name: what identifies it, and itself
    for name in stateful:
        saved = metadata.parameters[name]
        for state in saved.replicated:
            values.setdefault(state.key, {})[name] = (state.dtype, state.shape, state.crc32), state
        for key, value in common(dict(saved.scalars)).items():
            if key != _STEP:
                values.setdefault(key, {})[name] = repr(value), value
        for key in sorted(metadata.keys_by_name.get(name, ())):
            if (blocks := metadata.tensors[name, key].blocks) is not None:
                values.setdefault(COMPANIONS[key][1], {})[name] = blocks.codebook, blocks.codebook
    for_all: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for key, of_names in values.items():
        is_codebook = key in {codebook for _, codebook in COMPANIONS.values()}
        is_one = len({identity for identity, _ in of_names.values()}) == 1
        # whoever has no file of its own is not known to have states
        has_files = all(metadata.keys_by_name.get(name) or _has_step(metadata, name) for name in of_names)
        read: dict[Any, Any] = {}
        for name, (identity, value) in of_names.items():
            if identity not in read:
                read[identity] = _value(value, metadata, options)
            if is_one and has_files and (is_codebook or len(of_names) == len(stateful)):
                for_all[key] = read[identity]
            else:
                own.setdefault(name, {})[key] = read[identity]
    return SharedStates(for_all, own)


def _has_step(metadata: CheckpointMetadata, name: str) -> bool:
    return _STEP in dict(metadata.parameters[name].scalars)


def _value(value: Any, metadata: CheckpointMetadata, options: ReadOptions) -> Any:
    """A shared state as a tensor or number."""
    if isinstance(value, Codebook):
        return torch.tensor(value.values, dtype=torch.float32)
    if not isinstance(value, ReplicatedState):
        return plain(value)
    found = torch.empty(value.shape, dtype=getattr(torch, value.dtype))
    item = ReadItem(value.file, value.byte_offset, 0, 0, found.numel(), value.dtype)
    target = TargetTensor(value.key, 0, "", found.numel(), value.dtype)
    execute(ReadPlan(metadata.files, (target,), (item,) if found.numel() else ()), [found.view(-1)], options)
    return found


def replicated_states(metadata: CheckpointMetadata, options: ReadOptions) -> dict[str, dict[str, torch.Tensor]]:
    """The states of whole partitions, by parameter and key; equal ones are one tensor."""
    read: dict[tuple[str, str, tuple[int, ...], int], torch.Tensor] = {}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, saved in metadata.parameters.items():
        for state in saved.replicated:
            identity = state.key, state.dtype, state.shape, state.crc32
            if identity not in read:
                read[identity] = _value(state, metadata, options)
            found.setdefault(name, {})[state.key] = read[identity]
    return found


def dotted_states(metadata: CheckpointMetadata) -> list[str]:
    """Keys of states that a layout of nested keys would read as a collection."""
    keys = {key for _, key in metadata.tensors}
    for saved in metadata.parameters.values():
        keys.update(key for key, _ in saved.scalars)
        keys.update(state.key for state in saved.replicated)
    return sorted(key for key in keys if "." in key)


def refusals(metadata: CheckpointMetadata) -> dict[str, list[str]]:
    """What no file of a universal checkpoint can express, by why."""
    parameters = metadata.parameters.values()
    replicated = {state.key for saved in parameters for state in saved.replicated if state.differs}
    return {
        "it has states of whole partitions that differ between ranks": sorted(replicated - {UPDATE_NORM}),
        "it has scalar states of which each rank has its own": differing(dict(saved.scalars) for saved in parameters),
    }
