"""Which values in the files must be numbers, and whether they are. Padding is none of these."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, StorageChunk, TensorMetadata
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.pickled import TensorRef, open_pickled
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding
from elastic_ckpt.tools.verification.findings import INF, NAN

#: CheckpointMetadata keys have their own names; this one stands for the weights as the model computes with them.
WEIGHTS = "weights"
_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"})
#: Values that are no numbers: kind (:data:`NAN`, :data:`INF`) -> how many there are, and the index of the first.
Odd = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive values in a file.

    Attributes:
        offset: of the first one in the file, in bytes.
        numel: how many.
        dtype: name of their torch dtype.
        name, key: of the tensor that they are of.
        start: index of the first one in that tensor, or in the tensor-parallel shard of it.
    """

    offset: int
    numel: int
    dtype: str
    name: str
    key: str
    start: int

    @property
    def nbytes(self) -> int:
        """Their size."""
        return self.numel * ITEMSIZE[self.dtype]


def look(values: torch.Tensor) -> Odd:
    """Count NaN and infinite values of a flat tensor.

    A finite sum shows fast that all are finite, since neither NaN nor infinity ever leaves one. One that is not may
    still be an overflow: then every value is looked at.
    """
    if values.element_size() == 1:  # no 8-bit type can be summed
        values = values.to(torch.float32)
    total = values.sum(dtype=torch.float32) if values.dtype == torch.float16 else values.sum()
    if bool(torch.isfinite(total)):
        return {}
    masks = {NAN: torch.isnan(values), INF: torch.isinf(values)}
    return {kind: (int(mask.sum()), int(mask.int().argmax())) for kind, mask in masks.items() if mask.any()}


def add_odd(total: Odd, more: Odd, start: int = 0) -> None:
    """Add values that were counted from element ``start`` on to a total."""
    for kind, (count, first) in more.items():
        before, earliest = total.get(kind, (0, first + start))
        total[kind] = before + count, min(earliest, first + start)


def metadata_spans(metadata: CheckpointMetadata) -> dict[str, list[Span]]:
    """Path -> the values of a metadata's tensors in that file, replicas of other pipeline stages among them."""
    spans: dict[str, list[Span]] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        for chunk in tensor.chunks:
            if span := _span(tensor, chunk):
                spans.setdefault(metadata.files[chunk.file].path, []).append(span)
    return spans


def _span(tensor: TensorMetadata, chunk: StorageChunk) -> Span | None:
    """The values of a chunk; of a quantized one, its scales."""
    code = chunk.code
    if code is None:
        if tensor.dtype in _INTEGERS:
            return None
        return Span(chunk.byte_offset, chunk.range.numel, tensor.dtype, tensor.name, tensor.key, chunk.range.start)
    if not chunk.range.numel:
        return None
    first = code.position // code.format.numel
    last = (code.position + chunk.range.numel - 1) // code.format.numel
    offset = code.scales_offset + first * ITEMSIZE["float32"]
    return Span(offset, last - first + 1, "float32", tensor.name, code.format.scales, first)


def weight_spans(path: str, found: Found, with_states: bool, config: ElasticConfig) -> list[Span]:
    """The weights that the model computes with in a file, named by their paths in it.

    Args:
        path: of a file of the checkpoint.
        found: the checkpoint.
        with_states: whether to add optimizer states, of checkpoints that do not partition them.
        config: as for a load.
    """
    name, files = os.path.basename(path), found.files
    is_layer = name in files.layers.values()
    is_model = is_layer or name in files.model.values() or name in files.model_zero3.values()
    if os.path.dirname(path) != found.folder or not is_model:
        return []
    try:
        tree = open_pickled(path, config.trust_pickle).tree
    except ElasticCkptError:
        return []  # which is a finding already
    if not isinstance(tree, dict):
        return []
    tensors = list(_tensors(tree if is_layer else tree.get("module"), ""))
    if with_states and not is_layer:
        tensors += _tensors(tree.get("optimizer"), "optimizer")
    return [
        Span(ref.byte_offset, ref.numel, ref.dtype, name, WEIGHTS, 0)
        for name, ref in tensors
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


def without_repeats(known: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """``known``, and those of the others that are not the same bytes as one before them."""
    spans = list(known)
    seen = {(span.offset, span.numel) for span in spans}
    for span in others:
        if (span.offset, span.numel) not in seen:
            seen.add((span.offset, span.numel))
            spans.append(span)
    return spans


def judge(path: str, odd: Mapping[Span, Odd]) -> Iterator[Finding]:
    """What was seen in one file, one finding a tensor and kind; infinity in a buffer may be meant, and is a note."""
    totals: dict[tuple[str, str], Odd] = {}
    for span, counts in odd.items():
        add_odd(totals.setdefault((span.name, span.key), {}), counts, span.start)
    for (name, key), total in totals.items():
        counted = "block" if key.startswith("absmax") else "element"
        for kind, what in ((NAN, "NaN"), (INF, "infinite values")):
            if kind in total:
                count, first = total[kind]
                level = NOTE if kind == INF and key == BUFFER else ERROR
                yield Finding(level, kind, f"{count} {what} in {key}, the first at {counted} {first}", name, path)
