"""Findings of ``inspect`` and ``verify``, and those that metadata alone shows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from elastic_ckpt.core.chunks import ChunkSource, PartitionedChunks
from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata, SourceFile
from elastic_ckpt.errors import (
    DamagedError,
    ElasticCkptError,
    MismatchError,
    UnsafePickleError,
    UnsupportedError,
    listed,
)
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.planning.read_items import check_tiling
from elastic_ckpt.planning.state_matching import state_errors

Level = Literal["error", "note"]
ERROR: Level = "error"
NOTE: Level = "note"
#: Releases of DeepSpeed whose universal checkpoints (BLOOM's) have no file of the optimizer.
_WITHOUT_OPTIMIZER_FILE = re.compile(r"0\.\d\.")


@dataclass(frozen=True)
class Finding:
    """A problem of a checkpoint, or a fact worth knowing.

    Attributes:
        level: ``"error"`` if a load would be refused or lose something, or ``"note"``.
        kind: one word for programs, stable across versions. ``"not-checked"``, ``"no-checksum"`` and ``"reader"`` are
            of notes alone.
        parameter, file: name of the parameter, buffer or state, and path of the file concerned.
        text, expected, found, remedy: description, and details as far as known.
    """

    level: Level
    kind: str
    text: str
    parameter: str | None = None
    file: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None

    @property
    def message(self) -> str:
        """Text and details on one line, without control characters."""
        details = {"expected": self.expected, "found": self.found, "remedy": self.remedy}
        known = (f"{name}: {value}" for name, value in details.items() if value is not None)
        return one_line("; ".join([self.text, *known]))

    def line(self, folder: str) -> str:
        """The whole finding on one line, the file relative to ``folder``, without control characters."""
        parts = [self.kind]
        if self.file is not None:
            inside = os.path.relpath(self.file, folder)
            parts.append(self.file if inside.startswith("..") else inside)
        if self.parameter is not None:
            parts.append(self.parameter)
        return one_line(": ".join([*parts, self.message]))


def of_error(error: ElasticCkptError, kind: str, level: Level = ERROR) -> Finding:
    """The finding for an error."""
    known = {name: getattr(error, name) for name in ("file", "expected", "found", "remedy")}
    parameter = None if error.parameter == listed(()) else error.parameter
    return Finding(level, kind, error.problem, parameter, **known)


def kind_of(error: ElasticCkptError) -> str:
    """The kind of ``verify``'s finding for an error of the reader."""
    if isinstance(error, UnsafePickleError):
        return "unsafe-pickle"
    if isinstance(error, UnsupportedError):
        return "not-checked"
    return "mismatch" if isinstance(error, MismatchError) else "damaged"


def one_line(text: str) -> str:
    """Text from files on one line, with control characters escaped."""
    joined = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in joined)


def check_metadata(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Findings on coverage and states, from metadata alone."""
    yield from _of_tensors(metadata)
    is_universal, folder = metadata.source.is_universal, metadata.source.folder
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors:
            file = os.path.join(folder, UNIVERSAL_FOLDER) if is_universal else folder
            text = f"no fp32 master of this parameter: no {name}/{MASTER}.pt"
            yield Finding(ERROR, "incomplete", text, name, file)
    if is_universal and not _WITHOUT_OPTIMIZER_FILE.match(metadata.source.ds_version):
        file = os.path.join(folder, UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER)
        if not os.path.lexists(file):
            text = "no such file, which has the param groups' hyperparameters: restore it, or convert again"
            yield Finding(ERROR, "missing", text, file=file)
    yield from _state_findings(metadata)
    for error in state_errors(metadata):
        yield of_error(error, kind_of(error), ERROR if isinstance(error, DamagedError) else NOTE)
    for note in dict.fromkeys((*metadata.notes, *metadata.warnings)):
        yield Finding(NOTE, "reader", note)


def _state_findings(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Members of a param group have the same states; without ZeRO, those without gradients have none."""
    keys = metadata.keys_by_name
    may_lack_all = metadata.source.zero_stage == 0 and metadata.source.by_rank
    for group in range(len(metadata.groups)):
        states = {
            name: {*keys.get(name, ()), *dict(saved.scalars)}
            for name, saved in metadata.parameters.items()
            if saved.group == group and (name, MASTER) in metadata.tensors  # the others are reported above
        }
        every = set().union(*states.values())
        for name, present in states.items():
            if (lost := every - present) and (present or not may_lack_all):
                text = f"no {', '.join(sorted(lost))} of this parameter, but of others in its param group"
                yield Finding(ERROR, "state-missing", text, name, metadata.source.folder)


def _of_tensors(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Tensors with elements in no file or in two, or beyond the end of a file."""
    files = metadata.files
    known: dict[tuple[int, int], bool] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        try:
            check_tiling(metadata, tensor)
        except DamagedError as error:
            yield of_error(error, "incomplete")
        for chunk in chain.from_iterable(source for source in tensor.sources if not _ends_inside(source, files, known)):
            file = files[chunk.file]
            end = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype]
            if end > file.nbytes:
                text = f"{tensor.key} of this parameter reaches beyond the end of its file"
                sizes = {"expected": f"{end} bytes or more", "found": f"{file.nbytes} bytes"}
                yield Finding(ERROR, "unreadable", text, tensor.name, file.path, **sizes)


def _ends_inside(source: ChunkSource, files: Sequence[SourceFile], known: dict[tuple[int, int], bool]) -> bool:
    """Whether all flat tensors with a parameter end inside their files, which is computed once for each."""
    if not isinstance(source, PartitionedChunks):
        return False
    flat, key = source.flat, (id(source.flat), source.files_before)
    if key not in known:
        # offsets: one number for all, or each its own
        nbytes, begins = flat.rows * flat.numel * flat.itemsize, flat.byte_offsets
        ends = [begin + nbytes for begin in begins * (len(flat.files) // len(begins))]
        sizes = (files[source.files_before + file].nbytes for file in flat.files)
        known[key] = all(end <= size for end, size in zip(ends, sizes, strict=True))
    return known[key]
