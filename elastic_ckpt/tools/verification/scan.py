"""Where in the files values lie that must be numbers, and whether they are. Padding is none of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, StorageChunk, TensorMetadata
from elastic_ckpt.formats.pickled import PickledFile, TensorRef
from elastic_ckpt.tools.verification.findings import INF, NAN, Finding

#: CheckpointMetadata keys have their own names; this one stands for the weights as the model computes with them.
WEIGHTS = "weights"
_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"})


@dataclass(frozen=True, slots=True)
class Span:
    """Values that lie one behind the other in a file.

    Attributes:
        byte_offset: of the first one in the file.
        numel: how many.
        dtype: name of their torch dtype.
        name, key: of the tensor that they are of.
        start: number of the first one in that tensor, or in the tensor-parallel shard of it.
    """

    byte_offset: int
    numel: int
    dtype: str
    name: str
    key: str
    start: int

    @property
    def nbytes(self) -> int:
        """Their size."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def is_aligned(self) -> bool:
        """Whether each value begins at a multiple of its size in the file."""
        return self.byte_offset % ITEMSIZE[self.dtype] == 0


@dataclass(frozen=True, slots=True)
class Seen:
    """Values that are no finite numbers: how many NaN, how many infinite ones, and which is the first of each kind.

    ``first_nan`` and ``first_inf`` count from wherever the one who looked began; -1: there is none.
    """

    nans: int = 0
    infs: int = 0
    first_nan: int = -1
    first_inf: int = -1

    def moved(self, by: int) -> Seen:
        """The same, counted from a place so many elements earlier."""
        return Seen(
            self.nans,
            self.infs,
            self.first_nan + by if self.nans else -1,
            self.first_inf + by if self.infs else -1,
        )

    def __add__(self, other: Seen) -> Seen:
        def first(mine: int, others: int) -> int:
            return min((place for place in (mine, others) if place >= 0), default=-1)

        return Seen(
            self.nans + other.nans,
            self.infs + other.infs,
            first(self.first_nan, other.first_nan),
            first(self.first_inf, other.first_inf),
        )


FINE = Seen()


def look(values: torch.Tensor) -> Seen:
    """Count NaN and infinite values of a flat tensor.

    A sum shows fast that all are finite, since neither NaN nor infinity ever leaves one; what it does show may still be
    an overflow, so they are looked at one by one then.
    """
    if values.element_size() == 1:  # no 8-bit type can be summed
        values = values.to(torch.float32)
    total = values.sum(dtype=torch.float32) if values.dtype == torch.float16 else values.sum()
    if bool(torch.isfinite(total)):
        return FINE
    nan, inf = torch.isnan(values), torch.isinf(values)
    nans, infs = int(nan.sum()), int(inf.sum())
    return Seen(nans, infs, int(nan.int().argmax()) if nans else -1, int(inf.int().argmax()) if infs else -1)


def catalog_spans(metadata: CheckpointMetadata) -> dict[str, list[Span]]:
    """Path -> the values of a metadata's tensors that lie in that file, copies of other pipeline stages among them."""
    spans: dict[str, list[Span]] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        for chunk in tensor.chunks:
            for span in _spans(tensor, chunk):
                spans.setdefault(metadata.files[chunk.file].path, []).append(span)
    return spans


def _spans(tensor: TensorMetadata, chunk: StorageChunk) -> Iterator[Span]:
    code = chunk.code
    if code is None:
        if tensor.dtype not in _INTEGERS:
            yield Span(chunk.byte_offset, chunk.range.numel, tensor.dtype, tensor.name, tensor.key, chunk.range.start)
        return
    if not chunk.range.numel:
        return
    first = code.position // code.format.numel
    last = (code.position + chunk.range.numel - 1) // code.format.numel
    offset = code.scales_offset + first * ITEMSIZE["float32"]
    yield Span(offset, last - first + 1, "float32", tensor.name, code.format.scales, first)


def weight_spans(file: PickledFile, sections: Mapping[str, Any]) -> list[Span]:
    """The values of all tensors below some sections of a file, by the paths that lead to them.

    Args:
        file: where they lie.
        sections: name that the paths begin with (empty: none) -> a part of the file's tree.
    """
    found = (item for name, node in sections.items() for item in _tensors(node, name))
    return [
        Span(ref.byte_offset, ref.numel, ref.dtype, name, WEIGHTS, 0)
        for name, ref in found
        if ref.dtype not in _INTEGERS and ref.is_contiguous and ref.numel and ref.swap_id is None
    ]


def _tensors(node: Any, name: str) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(node, TensorRef):
        yield name, node
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        inside = node.items()
    elif isinstance(node, list | tuple):
        inside = enumerate(node)
    for key, value in inside:
        yield from _tensors(value, f"{name}/{key}" if name else str(key))


def without_twice(known: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """``known``, and those of the others that do not lie at the place of one of them."""
    known = list(known)
    places = {(span.byte_offset, span.numel) for span in known}
    unique: dict[tuple[int, int], Span] = {}
    for span in others:
        if (span.byte_offset, span.numel) not in places:
            unique.setdefault((span.byte_offset, span.numel), span)
    return known + list(unique.values())


def judge(path: str, seen: Mapping[Span, Seen]) -> tuple[list[Finding], list[Finding]]:
    """What was seen in one file as findings, one a tensor and kind, and notes: infinity may be meant in a buffer."""
    totals: dict[tuple[str, str], Seen] = {}
    for span, what in seen.items():
        totals[span.name, span.key] = totals.get((span.name, span.key), FINE) + what.moved(span.start)
    findings: list[Finding] = []
    notes: list[Finding] = []
    for (name, key), what in totals.items():
        counted = "block" if key.startswith("absmax") else "element"
        if what.nans:
            message = f"{what.nans} NaN in {key}, the first at {counted} {what.first_nan}"
            findings.append(Finding(NAN, message, path, name))
        if what.infs:
            message = f"{what.infs} infinite values in {key}, the first at {counted} {what.first_inf}"
            (notes if key == BUFFER else findings).append(Finding(INF, message, path, name))
    return findings, notes
