"""Writes ``torch.save`` files without having their tensors in memory.

torch writes the file with holes for the tensors' bytes, which are then filled in chunks, and last the checksums behind
the data and in the central directory. The result equals ``torch.save``'s byte for byte, except for the record
``.data/serialization_id``, which torch derives from the checksums that it knows, and the word ``cpu``, which its pickle
repeats for each of several tensors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from isal import isal_zlib
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.tools.conversion.pickling import save
from elastic_ckpt.tools.findings import PADDING
from elastic_ckpt.tools.verification.archive import Record, read_archive

#: Offsets of the CRC32 in a record's data descriptor and directory entry (APPNOTE.TXT, 4.3.9, 4.3.12).
_CRC32_IN_DESCRIPTOR, _CRC32_IN_ENTRY = 4, 16


def save_without_data(
    path: str, wrap: Callable[[list[torch.Tensor]], Any], tensors: Sequence[tuple[Shape, str]]
) -> list[Record]:
    """``torch.save`` tensors with room for their bytes; returns the record of each.

    Before torch 2.6, which cannot leave the bytes out, they are written as zeros: pages of a tensor that nothing has
    touched take no memory, but the disk writes them twice.

    Args:
        path: file to write; overwritten.
        wrap: puts the tensors, which have no data, into the object to pickle, in their order.
        tensors: their shapes and torch dtypes.
    """
    if hasattr(torch.serialization, "skip_data"):
        with FakeTensorMode():
            fakes = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in tensors]
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            save(wrap(fakes), path)
    else:
        save(wrap([torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in tensors]), path)
    with open(path, "rb") as stream:
        archive = read_archive(stream)
    records = {record.name.rpartition("/data/")[2]: record for record in archive.records}
    if any(kind != PADDING for kind, _ in archive.problems) or not {*map(str, range(len(tensors)))} <= records.keys():
        raise AssertionError(f"torch {torch.__version__} writes its files in a way that is not known here")
    return [records[str(number)] for number in range(len(tensors))]


def write_checksums(stream: BinaryIO, checksums: Mapping[Record, int]) -> None:
    """Write the CRC32 of records whose bytes have been filled in."""
    for record, crc in checksums.items():
        for at in (record.offset + record.nbytes + _CRC32_IN_DESCRIPTOR, record.entry_offset + _CRC32_IN_ENTRY):
            stream.seek(at)
            stream.write(struct.pack("<I", crc))


def write_tensor_file(
    path: str,
    wrap: Callable[[torch.Tensor], Any],
    shape: Shape,
    dtype: str,
    fill: Callable[[FlatRange, torch.Tensor], None],
    buffer: torch.Tensor,
) -> None:
    """Write a ``torch.save`` file of one tensor, one chunk after the other.

    Args:
        path, wrap, shape, dtype: as for :func:`save_without_data`.
        fill: called for each chunk, to fill a flat tensor with the given elements.
        buffer: flat uint8 tensor, overwritten: all the memory that is used.
    """
    (record,) = save_without_data(path, lambda tensors: wrap(tensors[0]), [(shape, dtype)])
    if not record.nbytes:
        return
    itemsize = getattr(torch, dtype).itemsize
    step, numel = buffer.numel() // itemsize, record.nbytes // itemsize
    values, crc = buffer[: step * itemsize].view(getattr(torch, dtype)), 0
    with open(path, "r+b") as stream:
        os.posix_fallocate(stream.fileno(), record.offset, record.nbytes)  # reports a full disk at once, and is faster
        stream.seek(record.offset)
        for first in range(0, numel, step):
            chunk = values[: min(step, numel - first)]
            fill(FlatRange(first, first + chunk.numel()), chunk)
            raw = chunk.view(torch.uint8).numpy().data
            crc = isal_zlib.crc32(raw, crc)
            stream.write(raw)
        write_checksums(stream, {record: crc})
