"""The directory of a ``torch.save`` archive: where each record's bytes are in the file.

torch writes uncompressed zip archives with miniz (``caffe2/serialize/inline_container.cc``): each record has a local
header, an extra field that pads its data to a multiple of 64 bytes, the data, and a data descriptor. Format: PKWARE's
APPNOTE 6.3.10, sections 4.3.7 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import BinaryIO, NamedTuple

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")
_HEADER = struct.Struct("<4s5H3L2H")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
#: The end of a directory may be followed by a comment of that size. Larger directories are refused.
_MOST_COMMENT_NBYTES, _MOST_DIRECTORY_NBYTES = 1 << 16, 1 << 28
_ZIP64 = 0x0001
_SIZES_FOLLOW = 0x0008
_ALIGNMENT = 64


class ArchiveError(Exception):
    """What is wrong with an archive, in words."""


class ArchiveRecord(NamedTuple):
    """A record by the directory: size and CRC32 (0: perhaps not computed) of its data, offset of its header."""

    name: str
    nbytes: int
    crc32: int
    header: int
    flags: int


class Directory:
    """The records of an open archive.

    Attributes:
        nbytes: size of the file.
        records: by name.
        root: the name of the folder that all records are in, after the name of the file as it was saved.
        surplus_nbytes: bytes between the directory and its end.

    Raises :class:`ArchiveError` for a directory that is missing, damaged, or of an archive with compressed records.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.nbytes = os.fstat(stream.fileno()).st_size
        start, nbytes, count = self._locate()
        self.records: Mapping[str, ArchiveRecord] = {record.name: record for record in self._entries(start, nbytes)}
        if len(self.records) != count:
            raise ArchiveError(f"{len(self.records)} records, but its end counts {count}: damaged, or two of one name")
        headers = sorted(record.header for record in self.records.values())
        if any(first == second for first, second in pairwise(headers)):
            raise ArchiveError("two records begin at the same byte")
        self._ends = [*headers, start]
        pickles = [name for name in self.records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ArchiveError(
                "a zip archive without a pickle" if not pickles else "a zip archive with several pickles"
            )
        self.root = pickles[0].removesuffix("/data.pkl")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file; :class:`ArchiveError` if it ends before."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ArchiveError(f"{self.nbytes} bytes, but a record reaches from byte {offset} to {offset + nbytes}")
        self._stream.seek(offset)
        raw = self._stream.read(nbytes)
        if len(raw) != nbytes:
            raise ArchiveError(f"the file ends inside the {nbytes} bytes from byte {offset} on")
        return raw

    def find(self, name: str) -> ArchiveRecord | None:
        """The record of a name below :attr:`root`."""
        return self.records.get(f"{self.root}/{name}")

    def read_record(self, name: str, most_nbytes: int) -> bytes:
        """A small record's data; :class:`ArchiveError` if it is missing, larger, or contradicts its checksum."""
        record = self.find(name)
        if record is None or record.nbytes > most_nbytes:
            size = "no record" if record is None else f"{record.nbytes} bytes in record"
            raise ArchiveError(f"{size} {name}, where at most {most_nbytes} bytes can be read")
        raw = self.read(self.offset(record), record.nbytes)
        if record.crc32 and zlib.crc32(raw) != record.crc32:  # 0: torch.serialization.set_crc32_options(False)
            raise ArchiveError(f"Bad CRC-32 for record {record.name}")
        return raw

    def offset(self, record: ArchiveRecord) -> int:
        """Offset of a record's first byte of data.

        Its local header need not be read where torch's alignment leads to the offset that follows from the next header.
        """
        following = self._ends[bisect_right(self._ends, record.header)]
        descriptor = 0
        if record.flags & _SIZES_FOLLOW:
            descriptor = 24 if record.nbytes >= _MAX32 or record.header >= _MAX32 else 16
        offset = following - descriptor - record.nbytes
        return offset if offset == _aligned(record) else self._offset_by_header(record, following)

    def _offset_by_header(self, record: ArchiveRecord, following: int) -> int:
        signature, *_, name_nbytes, extra_nbytes = _HEADER.unpack(self.read(record.header, _HEADER.size))
        name = self.read(record.header + _HEADER.size, name_nbytes)
        if signature != b"PK\x03\x04" or _text(name, record.flags) != record.name:
            raise ArchiveError(f"the header of record {record.name} at byte {record.header} is damaged")
        offset: int = record.header + _HEADER.size + name_nbytes + extra_nbytes
        if offset + record.nbytes > following:
            raise ArchiveError(f"record {record.name} reaches into the next one, at byte {following}")
        return offset

    def _locate(self) -> tuple[int, int, int]:
        """Offset, size and number of entries of the directory."""
        tail_nbytes = min(self.nbytes, _END.size + _MOST_COMMENT_NBYTES)
        tail = self.read(self.nbytes - tail_nbytes, tail_nbytes)
        at = tail.rfind(b"PK\x05\x06", 0, len(tail) - _END.size + 4)
        if at < 0:
            raise ArchiveError(f"{self.nbytes} bytes without a directory: the file is truncated, or no zip archive")
        _, _, _, _, count, nbytes, start, _ = _END.unpack_from(tail, at)
        end = self.nbytes - tail_nbytes + at
        before = end - _LOCATOR.size - _END64.size
        if before >= 0:
            wide, locator = self.read(before, _END64.size), self.read(before + _END64.size, _LOCATOR.size)
            if wide.startswith(b"PK\x06\x06") and locator.startswith(b"PK\x06\x07"):
                *_, count, nbytes, start = _END64.unpack(wide)
                end = before
        # DeepSpeed's fast writer of several ranks leaves a part of its last block between directory and end
        if start + nbytes > end or count * _ENTRY.size > nbytes or nbytes > _MOST_DIRECTORY_NBYTES:
            raise ArchiveError(f"the end of its directory says {count} records in {nbytes} bytes from byte {start} on")
        self.surplus_nbytes = end - start - nbytes
        return start, nbytes, count

    def _entries(self, start: int, nbytes: int) -> Iterator[ArchiveRecord]:
        raw, at, unpack = self.read(start, nbytes), 0, _ENTRY.unpack_from
        while at < nbytes:
            if nbytes - at < _ENTRY.size:
                raise ArchiveError("its directory ends inside an entry")
            (signature, flags, method, crc32, packed, size, name_nbytes, extra_nbytes, comment_nbytes, header) = unpack(
                raw, at
            )
            at += _ENTRY.size
            extra_at = at + name_nbytes
            name = _text(raw[at:extra_at], flags)
            at = extra_at + extra_nbytes + comment_nbytes
            if signature != b"PK\x01\x02" or at > nbytes:
                raise ArchiveError("an entry of its directory is damaged")
            if _MAX32 in (packed, size, header):
                size, packed, header = _wide(raw[extra_at : extra_at + extra_nbytes], size, packed, header)
            if method or packed != size:  # tensors are read by their offsets, which would give other bytes
                raise ArchiveError(f"a zip archive that was packed anew: {name} is compressed")
            if header + _HEADER.size + size > start:
                raise ArchiveError(f"record {name} reaches to byte {header + _HEADER.size + size}, into the directory")
            yield ArchiveRecord(name, size, crc32, header, flags)


def _text(name: bytes, flags: int) -> str:
    return name.decode("utf-8" if flags & 0x0800 else "cp437", "backslashreplace")


def _wide(extra: bytes, *fields: int) -> list[int]:
    """The fields, those that are all ones taken from the block of 64-bit values in ``extra``."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            values = (value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + nbytes // 8 * 8]))
            return [next(values, _MAX32) if field == _MAX32 else field for field in fields]
        at += 4 + nbytes
    return list(fields)


def _aligned(record: ArchiveRecord) -> int:
    """Where torch's ``getPadding`` (inline_container.cc) puts the data of a record."""
    start = record.header + _HEADER.size + len(record.name.encode()) + 4
    if record.nbytes >= _MAX32 or record.header >= _MAX32:
        start += 4 + 16 * (record.nbytes >= _MAX32) + 8 * (record.header >= _MAX32)
    return -(-start // _ALIGNMENT) * _ALIGNMENT
