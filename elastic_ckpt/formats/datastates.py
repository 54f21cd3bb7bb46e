"""Files of DataStates-LLM, which DeepSpeed saves with under ``"datastates_ckpt"`` in its config.

Eight bytes with the length of a header, the header (JSON), the bytes of all tensors, and a pickle of the state in which
``"TENSOR|" + key`` is in the place of each tensor. The key is the path of dictionary keys and list positions, joined by
``|``; the header has its dtype, shape and ``data_offsets``, which count from the end of the header. There are no
checksums. Source: ``save_background`` (datastates/llm/checkpointing.py, August 2024, and state_ckpt.py of 2025).
Engines of its later development keep the header elsewhere: ``offsets`` instead of ``data_offsets``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, BinaryIO

from elastic_ckpt.core.flat_ranges import checked_shape
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.formats.json_text import MOST_JSON_NBYTES, parse_json
from elastic_ckpt.formats.torch_archive.archive import PickledFile, most_pickle_nbytes, unpickled
from elastic_ckpt.formats.torch_archive.directory import ArchiveError
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.tree import check_tree

_LENGTH_NBYTES = 8
_METADATA, _TENSOR = "datastates_metadata", "TENSOR|"
_LONGEST_KEY = 1 << 12


def is_datastates(stream: BinaryIO) -> bool:
    """Whether an open file begins like one of DataStates-LLM. The stream is left at its start."""
    begin = stream.read(_LENGTH_NBYTES + 1)
    stream.seek(0)
    nbytes = int.from_bytes(begin[:_LENGTH_NBYTES], "little")
    return begin[_LENGTH_NBYTES:] == b"{" and nbytes <= os.fstat(stream.fileno()).st_size - _LENGTH_NBYTES


def read_datastates_tree(stream: BinaryIO, path: str, trust_pickle: bool) -> PickledFile:
    """Read an open file; errors as of :func:`~elastic_ckpt.formats.torch_archive.archive.read_archive_tree`."""
    nbytes = os.fstat(stream.fileno()).st_size
    header_nbytes = int.from_bytes(stream.read(_LENGTH_NBYTES), "little")
    if header_nbytes > MOST_JSON_NBYTES:
        raise ArchiveError(f"a header of {header_nbytes} bytes, where at most {MOST_JSON_NBYTES} can be read")
    start = _LENGTH_NBYTES + header_nbytes
    header = parse_json(stream.read(header_nbytes))
    at, end = _offsets(header.pop(_METADATA, None), start, nbytes)
    if end - at > (most_nbytes := most_pickle_nbytes(nbytes, trust_pickle)):
        raise ArchiveError(f"a pickle of {end - at} bytes, where at most {most_nbytes} can be read")
    refs = {key: _tensor_ref(key, entry, start, at) for key, entry in header.items()}
    spans = sorted(
        (ref.byte_offset, ref.byte_offset + ref.numel * ITEMSIZE[ref.dtype], key) for key, ref in refs.items()
    )
    for (_, last, key), (first, _, other) in pairwise(spans):
        if first < last:
            raise ArchiveError(f"its header lets the tensors {key} and {other} overlap"[:300])
    stream.seek(at)
    tree = _with_tensors(unpickled(stream.read(end - at), nbytes, trust_pickle), "", refs)
    if refs:
        raise ArchiveError(f"its state does not have the tensors {sorted(refs)[:8]}, which its header lists")
    check_tree(tree)
    return PickledFile(path, nbytes, tree)


def _offsets(entry: Any, start: int, end: int) -> tuple[int, int]:
    """Offsets in the file of what a header's entry describes, from ``start`` to ``end``."""
    offsets = entry.get("data_offsets") if isinstance(entry, Mapping) else None
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise ArchiveError("its header has an entry without data_offsets: a layout of DataStates-LLM that is not known")
    first, last = offsets
    if not 0 <= first <= last <= end - start:
        raise ArchiveError(f"its header describes bytes {first} to {last} of {end - start}")
    return start + first, start + last


def _tensor_ref(key: str, entry: Any, start: int, end: int) -> TensorRef:
    first, last = _offsets(entry, start, end)
    dtype, shape = str(entry.get("dtype")).removeprefix("torch."), checked_shape(entry["shape"], f"tensor {key}")
    if dtype not in ITEMSIZE:
        raise ArchiveError(f"tensor {key} of dtype {entry.get('dtype')}"[:300])
    if math.prod(shape) * ITEMSIZE[dtype] != last - first:
        raise ArchiveError(f"tensor {key} of {dtype} and shape {shape} in {last - first} bytes"[:300])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return TensorRef(dtype, shape, tuple(strides), first)


def _with_tensors(node: Any, key: str | None, refs: dict[str, TensorRef]) -> Any:
    """The tree with each tensor, taken out of ``refs``, in its place; ``key`` is ``None`` where none can be."""
    if isinstance(node, dict):
        return {name: _with_tensors(value, _below(key, name), refs) for name, value in node.items()}
    if type(node) is list:
        return [_with_tensors(value, _below(key, position), refs) for position, value in enumerate(node)]
    if key is None or type(node) is not str or node != _TENSOR + key:
        return node
    if key not in refs:
        raise ArchiveError(f"its header does not list the tensor {key}, or its state has two of that key")
    return refs.pop(key)


def _below(key: str | None, name: Any) -> str | None:
    below = None if key is None else f"{key}|{name}" if key else str(name)
    return below if below is None or len(below) <= _LONGEST_KEY else None
