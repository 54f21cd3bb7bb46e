"""Folders of safetensors: of Hugging Face's libraries, and of ``elastic-ckpt export`` with optimizer states. For tools.

The format is that of https://github.com/huggingface/safetensors#format (0.8.0): the header's length as a little-endian
64-bit integer, the header as JSON, and the tensors in row-major order, without gaps. Files are untrusted.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from elastic_ckpt.core.chunks import StorageChunk, listed
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    FROZEN,
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.training_state import BatchSizes, TrainingState
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.base import Checkpoint, Found, MetadataOptions
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import named_errors

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
METADATA = "__metadata__"
#: torch dtype -> its name in the format.
DTYPES = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "complex64": "C64",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
    }
)
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
#: Largest header that the library reads.
_MOST_HEADER_NBYTES = 100_000_000
#: Files with optimizer states, as ``elastic-ckpt export --optimizer`` writes them.
_OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class _Header(SourceFile):
    """One file: dtype, shape and byte offset of each tensor, and its metadata."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
    metadata: Mapping[str, str]


def find_safetensors(folder: str) -> Found | None:
    """The folder, if it has safetensors files or an index of some."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if not any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        return None
    path = os.path.abspath(folder)
    return Found("safetensors", path, os.path.basename(path), sort_names((), is_universal=False))


def read_safetensors(found: Found, options: MetadataOptions) -> Checkpoint:
    """Read the headers of all files. Local.

    Raises :class:`DamagedError` if a file is missing or damaged, :class:`MismatchError` if two have a tensor of a name.
    """
    headers = {name: _read_header(found.path(name)) for name in _file_names(found)}
    owner: dict[tuple[bool, str], int] = {}
    for number, (file, header) in enumerate(headers.items()):
        for name in header.tensors:
            first = owner.setdefault((file.startswith(_OPTIMIZER), name), number)
            if first != number:
                path = list(headers.values())[first].path
                raise MismatchError(
                    "two files of this folder have a tensor of one name",
                    parameter=name,
                    file=header.path,
                    expected="one file for each tensor",
                    found=f"also in {path}",
                    remedy="remove the file that does not belong here",
                )
    files = list(headers.values())
    metadata = _metadata(found, files, owner)
    steps = max((dict(saved.scalars).get("step", 0) for saved in metadata.parameters.values()), default=0)
    counters = {"global_steps": int(steps), "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    state = TrainingState(counters, BatchSizes(None, None, None), None, None, False, {})
    return Checkpoint(metadata, state, files[0].path, len(files))


def _file_names(found: Found) -> list[str]:
    """The files of the folder, and those that an index names."""
    names = {name for name in os.listdir(found.folder) if name.endswith(SUFFIX)}
    for index in [name for name in os.listdir(found.folder) if name.endswith(INDEX_SUFFIX)]:
        with named_errors(found.path(index)), open(found.path(index), "rb") as stream:
            named = {str(name) for name in json.loads(stream.read(_MOST_HEADER_NBYTES))["weight_map"].values()}
            if any(os.path.basename(name) != name for name in named):
                raise ValueError("a file that is not in this folder")
            names |= named
    return sorted(names)


def _read_header(path: str) -> _Header:
    if not os.path.isfile(path):
        raise DamagedError(
            "a file of the checkpoint is missing",
            file=path,
            expected="a file that the index names",
            found="no such file",
            remedy="restore the file",
        )
    with named_errors(path), open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        (nbytes,) = struct.unpack("<Q", stream.read(8))
        if nbytes > min(_MOST_HEADER_NBYTES, size - 8):
            raise ValueError(f"a header of {nbytes} bytes in a file of {size}")
        header = json.loads(stream.read(nbytes), object_pairs_hook=_unique)
        metadata, position, tensors = header.pop(METADATA, {}), 8 + nbytes, {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _TORCH_DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            start, stop = (8 + nbytes + int(offset) for offset in entry["data_offsets"])
            if start != position or stop - start != math.prod(shape) * ITEMSIZE[dtype]:
                raise ValueError(f"{name} of {dtype} and shape {shape} from byte {start} to {stop}, after {position}")
            tensors[name], position = (dtype, shape, start), stop
        if position != size:
            raise ValueError(f"{size} bytes, where the header's tensors end at byte {position}")
    return _Header(path, size, tensors, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("two entries of one name")
    return dict(pairs)


def _metadata(found: Found, files: list[_Header], owner: Mapping[tuple[bool, str], int]) -> CheckpointMetadata:
    facts: dict[str, str] = {}
    for file in files:
        facts |= file.metadata if os.path.basename(file.path).startswith(_OPTIMIZER) else {}
    scalars = json.loads(facts.get("scalars", "{}"))
    groups = [
        {key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()}
        for group in json.loads(facts.get("param_groups", "[]"))
    ]
    members = {name: number for number, group in enumerate(groups) for name in group.pop("params")}
    tensors: dict[tuple[str, str], TensorMetadata] = {}
    for (is_state, entry), number in owner.items():
        key, _, name = entry.partition(".") if is_state else (MASTER if entry in members else FROZEN, "", entry)
        dtype, shape, start = files[number].tensors[entry]
        whole = FlatRange(0, math.prod(shape))
        sources = listed(StorageChunk(whole, number, start)) if whole.numel else listed()
        tensors[name, key] = TensorMetadata(name, key, shape, dtype, sources)
    parameters = {
        name: SavedParameter(tensors[name, MASTER].shape, group, tuple(sorted(scalars.get(name, {}).items())))
        for name, group in members.items()
        if (name, MASTER) in tensors
    }
    every = [file.metadata.items() for file in files]
    ties = {alias: name for items in every for alias, name in items if (False, name) in owner}
    return CheckpointMetadata(
        source=SourceFacts(found.format, found.folder, found.tag, 0, len(files), ""),
        files=tuple(SourceFile(file.path, file.nbytes) for file in files),
        parameters=parameters,
        tensors=tensors,
        groups=tuple(groups),
        aliases={alias: name for alias, name in ties.items() if (False, alias) not in owner},
    )
