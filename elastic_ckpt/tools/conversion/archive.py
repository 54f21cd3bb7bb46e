"""Writes a ``torch.save`` file whose one tensor never is in memory as a whole.

``torch.serialization.skip_data`` has torch write the file with a hole where the tensor's bytes belong. They are filled
in a chunk at a time, and then the checksum, which torch could not know, is put where the zip format wants it: behind
the data and in the central directory. The result is byte for byte what ``torch.save`` writes, but for the record
``.data/serialization_id``, which torch makes of the checksums as it knows them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from isal import isal_zlib
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.tools.verification.archive import Record, read_archive

#: Fills a flat tensor with the given elements of the one that is written.
Fill = Callable[[FlatRange, torch.Tensor], None]

#: Where the CRC32 is in a record's data descriptor and in its entry of the directory (APPNOTE.TXT, 4.3.9, 4.3.12).
_CRC32_IN_DESCRIPTOR, _CRC32_IN_ENTRY = 4, 16
#: How the record of a file's first tensor is called.
_TENSOR = "/data/0"


def write_tensor_file(
    path: str,
    wrap: Callable[[torch.Tensor], Any],
    shape: tuple[int, ...],
    dtype: str,
    fill: Fill,
    scratch: torch.Tensor,
) -> None:
    """Write one tensor file. Needs no memory beside ``scratch``.

    Args:
        path: file to write; overwritten.
        wrap: puts the tensor, which has no data, into the object to pickle.
        shape, dtype: of the tensor; the dtype by name.
        fill: called for one chunk after the other, in order.
        scratch: memory for one chunk: a flat uint8 tensor, overwritten. Fresh memory for every file would cost more
            than reading it.
    """
    with FakeTensorMode():
        fake = torch.empty(shape, dtype=getattr(torch, dtype))
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(wrap(fake), path)
    if not fake.numel():
        return
    step = scratch.numel() // fake.itemsize
    buffer, crc = scratch[: step * fake.itemsize].view(fake.dtype), 0
    with open(path, "r+b") as stream:
        record = _find_record(stream)
        os.posix_fallocate(stream.fileno(), record.offset, record.nbytes)  # a full disk shows here; and it is faster
        stream.seek(record.offset)
        for first in range(0, fake.numel(), step):
            chunk = buffer[: min(step, fake.numel() - first)]
            fill(FlatRange(first, first + chunk.numel()), chunk)
            raw = chunk.view(torch.uint8).numpy().data
            crc = isal_zlib.crc32(raw, crc)
            stream.write(raw)
        for at in (record.offset + record.nbytes + _CRC32_IN_DESCRIPTOR, record.entry_offset + _CRC32_IN_ENTRY):
            stream.seek(at)
            stream.write(struct.pack("<I", crc))


def _find_record(stream: BinaryIO) -> Record:
    """The record of the one tensor."""
    archive = read_archive(stream)
    record = next((record for record in archive.records if record.name.endswith(_TENSOR)), None)
    if record is None or archive.problems:
        raise AssertionError(f"torch {torch.__version__} writes its files in a way that is not known here")
    return record
