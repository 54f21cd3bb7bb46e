"""Optimizer states as files hold them: sorted into tensors and scalars, whatever ZeRO stage saved them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, BlockCode
from elastic_ckpt.core.state_kinds import COMPANIONS, REPLICATED, BlockFormat, Codebook, StateOptions
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.classify import Digest, SavedKind
from elastic_ckpt.formats.codebooks import NESTED, codebook_of, own_maps
from elastic_ckpt.formats.pickled import PickledFile, TensorRef, materialise

#: Tensors up to this size are looked into: they might be the same on all ranks.
_SMALL_NUMEL = 4096
_MOST_REPLICATED_NUMEL = 1 << 24


@dataclass(frozen=True)
class StatesOfOne:
    """The optimizer states of one flat tensor or parameter in one file.

    Attributes:
        tensors: those that have dimensions.
        points: tensors without dimensions, which are scalars too: states, if the parameter has none either.
        scalars: scalar ones as (key, value), sorted by key.
        scalar_forms: how each scalar was saved: ``"int"``, ``"float"``, or the name of a torch dtype.
        opaque: objects that are neither: key -> description.
        digests: of small tensors.
        codebooks: quantization maps among them.
    """

    tensors: Mapping[str, TensorRef]
    scalars: tuple[tuple[str, float], ...] = ()
    scalar_forms: Mapping[str, str] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, Digest] = field(default_factory=dict)
    codebooks: Mapping[str, Codebook] = field(default_factory=dict)
    points: Mapping[str, TensorRef] = field(default_factory=dict)


def sort_states(file: PickledFile, saved: Mapping[str, Any], options: StateOptions) -> StatesOfOne:
    """Sort the optimizer states of one flat tensor or parameter, and look into the small ones. Local."""
    flat = {**saved, **saved.get(NESTED, {})}
    flat.pop(NESTED, None)
    tensors: dict[str, TensorRef] = {}
    scalars: dict[str, float] = {}
    forms: dict[str, str] = {}
    opaque: dict[str, str] = {}
    points: dict[str, TensorRef] = {}
    for key, value in flat.items():
        if key in (MASTER, BUFFER, FROZEN):
            opaque[key] = "a state of a name that masters, buffers or frozen parameters go by here"
        elif value is None:
            continue  # a buffer that the optimizer does not use, as SGD's without momentum
        elif isinstance(value, TensorRef) and value.shape:
            tensors[key] = value
        elif isinstance(value, TensorRef):
            scalars[key], forms[key] = materialise(file, value).item(), value.dtype
            points[key] = value
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            scalars[key], forms[key] = value, type(value).__name__
        else:
            opaque[key] = f"a {type(value).__name__}"
    digests, codebooks = _look_into(file, tensors, options)
    return StatesOfOne(tensors, tuple(sorted(scalars.items())), forms, opaque, digests, codebooks, points)


def _look_into(
    file: PickledFile, tensors: Mapping[str, TensorRef], options: StateOptions
) -> tuple[dict[str, Digest], dict[str, Codebook]]:
    digests: dict[str, Digest] = {}
    codebooks: dict[str, Codebook] = {}
    qmaps = {qmap for _, qmap in COMPANIONS.values()}
    for key, ref in tensors.items():
        small = ref.numel <= _SMALL_NUMEL and "absmax" not in key
        declared = options.says_replicated(key) and ref.numel <= _MOST_REPLICATED_NUMEL
        if key in qmaps and ref.numel <= _SMALL_NUMEL:
            codebooks[key] = codebook_of(materialise(file, ref))
        elif small or declared:
            digests[key] = _digest(materialise(file, ref))
    return digests, codebooks


def _digest(tensor: torch.Tensor) -> Digest:
    flat = tensor.contiguous().view(-1)
    crc32 = zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
    ascending = flat.numel() > 1 and not flat.dtype.is_complex and bool((flat[1:] > flat[:-1]).all())
    return Digest(crc32, ascending, flat.numel() > 1 and bool((flat == flat[0]).all()))


def block_code(
    key: str, kind: SavedKind, states: StatesOfOne, codebooks: Mapping[str, Codebook], row: int, numel: int, start: int
) -> BlockCode | None:
    """How an chunk of a saved state is quantized; ``None``: it is not.

    Args:
        key, kind: of the state.
        states: the states that it lies among, its scales too.
        codebooks: the quantization maps (:func:`resolve_codebooks`).
        row: in which row of the state.
        numel: elements of a row, padding included: blocks are counted anew in each.
        start: of the chunk in its row.
    """
    if not kind.block_numel:
        return None
    scales, qmap = COMPANIONS[key]
    blocks = BlockFormat(kind.block_numel, scales, codebooks[qmap])
    first = row * blocks.blocks(numel) * ITEMSIZE["float32"]
    return BlockCode(blocks, start, states.tensors[scales].byte_offset + first)


def resolve_codebooks(files: Iterable[tuple[str, StatesOfOne]]) -> tuple[dict[str, Codebook], tuple[str, ...]]:
    """The quantization map behind each ``qmap`` key: the one that all files hold, else bitsandbytes' own.

    Args:
        files: (path, states) of every flat tensor and rank.

    Returns:
        The maps by key, and notes about those that were missing or damaged somewhere.

    Raises:
        DamagedError: the saved maps differ or are missing, and bitsandbytes' own cannot be had or is none of them.
    """
    held: dict[str, dict[Codebook | None, str]] = {}
    for path, states in files:
        for key, (_, qmap) in COMPANIONS.items():
            if key in states.tensors and states.tensors[key].dtype == "uint8":
                held.setdefault(qmap, {}).setdefault(states.codebooks.get(qmap), path)
    resolved, notes = {}, []
    for qmap, found in held.items():
        usable = [codebook for codebook in found if codebook is not None and codebook.problem is None]
        own = own_maps().get(qmap)
        if len(found) == 1 and usable:
            resolved[qmap] = usable[0]
            if own is not None and own != usable[0]:
                notes.append(f"{qmap} is not bitsandbytes' own map, but the same in all files: taken as saved")
            continue
        if own is None or (usable and own not in usable):
            raise _no_map(qmap, found, own)
        path, problem = next((p, _problem(c)) for c, p in found.items() if c != own)
        resolved[qmap] = own
        notes.append(f"{qmap} in {path} {problem}: rebuilt from bitsandbytes' own map")
    return resolved, tuple(notes)


def kind_notes(kinds: Mapping[str, SavedKind]) -> tuple[str, ...]:
    """The states that were told apart by a guess."""
    return tuple(
        f"optimizer state {key} was taken as replicated: {kind.why}"
        for key, kind in kinds.items()
        if kind.kind == REPLICATED and kind.why
    )


def unmatched_names(kinds: Mapping[str, SavedKind], options: StateOptions) -> tuple[str, ...]:
    """A warning of names in the user's options that no state of the checkpoint has."""
    companions = {name for key, kind in kinds.items() if kind.block_numel for name in COMPANIONS[key]}
    unmatched = sorted({*options.named, *options.schema} - {*kinds, *companions}) if kinds else []
    if not unmatched:
        return ()
    return (
        f'the checkpoint holds no optimizer state named {", ".join(unmatched)}, of which "non_shard_state_keys" or '
        '"state_schema" speaks',
    )


def _problem(codebook: Codebook | None) -> str:
    if codebook is None:
        return "is missing"
    return f"has {codebook.problem}" if codebook.problem else "differs from that of other ranks"


def _no_map(qmap: str, found: Mapping[Codebook | None, str], own: Codebook | None) -> DamagedError:
    codebook, path = next(iter(found.items()))
    return DamagedError(
        f"the quantization map {qmap} is damaged, and what it was cannot be told",
        parameter=qmap,
        file=path,
        expected="one map of 256 ascending values in all files",
        found=f"{len(found)} different ones" if len(found) > 1 else _problem(codebook),
        remedy=(
            "pip install bitsandbytes, whose own map takes its place"
            if own is None
            else "none of the saved maps is that of the installed bitsandbytes: install the version that saved them"
        ),
    )
