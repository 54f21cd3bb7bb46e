"""The directory of a ``torch.save`` archive: where each record's bytes are in the file.

torch writes uncompressed zip archives with miniz (``caffe2/serialize/inline_container.cc``): each record has a local
header, an extra field that pads its data to a multiple of 64 bytes, the data, and a data descriptor. Format: PKWARE's
APPNOTE 6.3.10, sections 4.3.7 to 4.3.16 and 4.5.3.

An archive of which miniz might read another pickle than the one that is read here is refused: miniz takes the folder of
the first record, looks names up without regard to case, and finds data by the lengths in the local header.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.charges import limit_error

END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
#: An entry of the directory, without name, extra field and comment: signature, versions made by and needed, flags,
#: method, time, date, CRC32, both sizes, three lengths, disk, internal and external attributes, offset of the header.
ENTRY = struct.Struct("<4s6H3L5H2L")
#: The header of a record: signature, version needed, flags, method, time, date, CRC32, both sizes, two lengths.
HEADER = struct.Struct("<4s5H3L2H")
MAX32 = 0xFFFFFFFF
#: Block of an extra field with 64-bit sizes.
ZIP64 = 0x0001
#: Flag: CRC32 and sizes follow the data.
SIZES_FOLLOW = 0x0008
#: The end of a directory may be followed by a comment of that size.
_MOST_COMMENT_NBYTES = 1 << 16
#: Larger directories are refused.
_MOST_DIRECTORY_NBYTES = 1 << 28
_FIRST_TAIL_NBYTES = 512
_ALIGNMENT = 64


class ArchiveError(Exception):
    """What is wrong with an archive, in words."""


class ArchiveRecord(NamedTuple):
    """A record by the directory."""

    name: str
    nbytes: int  # of its data
    crc32: int  # of its data; 0: perhaps not computed
    header: int  # offset of its header in the file
    flags: int
    is_stored: bool  # not compressed


class Listing:
    """What the directory of an open archive says, not compared with the rest; :class:`ArchiveError` if there is none.

    Offset and size of the directory (``start``, ``directory_nbytes``) and the number of its records (``count``) are
    those that its end states; ``surplus_nbytes`` are between the two.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.nbytes = stream.seek(0, os.SEEK_END)  # of the file
        for most in (_FIRST_TAIL_NBYTES, END.size + _MOST_COMMENT_NBYTES):  # few archives have a long comment
            tail_nbytes = min(self.nbytes, most)
            tail = self.read(self.nbytes - tail_nbytes, tail_nbytes)
            at = tail.rfind(b"PK\x05\x06", 0, len(tail) - END.size + 4)
            if at >= 0:
                break
        if at < 0:
            begin = self.read(0, min(self.nbytes, 9))
            if begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= self.nbytes - 8:  # of its header, in JSON
                remedy = "only DeepSpeed with DataStates-LLM's checkpoint engine can read them, and save them again"
                raise UnsupportedError("files of DataStates-LLM are not supported", remedy=remedy)
            raise ArchiveError(f"{self.nbytes} bytes without a directory: the file is truncated, or no zip archive")
        _, _, _, _, self.count, nbytes, self.start, _ = END.unpack_from(tail, at)
        end = self.nbytes - tail_nbytes + at
        before = end - LOCATOR.size - END64.size
        if before >= 0:
            wide = self.read(before, END64.size)
            locator = self.read(before + END64.size, LOCATOR.size)
            if locator.startswith(b"PK\x06\x07"):
                end = before if wide.startswith(b"PK\x06\x06") else end
                stated = LOCATOR.unpack(locator)[2]  # by which miniz goes, wherever that is
                wide = self.read(stated, END64.size) if stated <= self.nbytes - END64.size else b""
                if wide.startswith(b"PK\x06\x06"):
                    *_, self.count, nbytes, self.start = END64.unpack(wide)
        # DeepSpeed's fast writer of several ranks leaves a part of its last block between directory and end
        self.directory_nbytes = nbytes
        self.surplus_nbytes = end - self.start - nbytes
        most_nbytes = self.count * (ENTRY.size + 3 * 0xFFFF)  # of names, extra fields and comments
        if self.surplus_nbytes < 0 or not self.count * ENTRY.size <= nbytes <= most_nbytes:
            what = f"{self.count} records in {nbytes} bytes from byte {self.start} on"
            raise ArchiveError(f"the end of its directory says {what}")
        if nbytes > _MOST_DIRECTORY_NBYTES:
            raise limit_error(f"a directory of at most {_MOST_DIRECTORY_NBYTES} bytes", f"{nbytes} bytes")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file; :class:`ArchiveError` if it ends before."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ArchiveError(f"{self.nbytes} bytes, but a record reaches from byte {offset} to {offset + nbytes}")
        self._stream.seek(offset)
        raw = self._stream.read(nbytes)
        if len(raw) != nbytes:
            raise ArchiveError(f"the file ends inside the {nbytes} bytes from byte {offset} on")
        return raw

    def entries(self) -> Iterator[ArchiveRecord]:
        """All records, in the directory's order."""
        raw = self.read(self.start, self.directory_nbytes)
        at = 0
        unpack = ENTRY.unpack_from
        while at < len(raw):
            if len(raw) - at < ENTRY.size:
                raise ArchiveError("its directory ends inside an entry")
            signature, _, _, flags, method, _, _, crc32, packed, size, *lengths, _, _, _, header = unpack(raw, at)
            name_nbytes, extra_nbytes, comment_nbytes = lengths
            name_at = at + ENTRY.size
            extra_at = name_at + name_nbytes
            following = extra_at + extra_nbytes + comment_nbytes
            if signature != b"PK\x01\x02" or following > len(raw):
                raise ArchiveError("an entry of its directory is damaged")
            name = _decoded(raw[name_at:extra_at], flags)
            if MAX32 in (packed, size, header):
                size, packed, header = _wide(raw[extra_at : extra_at + extra_nbytes], size, packed, header)
            yield ArchiveRecord(name, size, crc32, header, flags, not method and packed == size)
            at = following


@dataclass(frozen=True, eq=False)
class Layout:
    """The records of a directory."""

    records: Mapping[str, ArchiveRecord]  # by name below the root; that of one outside it begins with ``../``
    ends: Sequence[int]  # offsets of headers, and of the directory


#: By offset, size and number of entries of a directory, and the digest of it without the root's name.
Layouts = dict[tuple[int, int, int, bytes], Layout]


class Directory(Listing):
    """The records of an open archive, with a layout in ``known`` if there is such a one; else it is added to them.

    ``layout`` names records as in the first file with it. ``root`` is the folder that all records are in, named after
    the file as it was saved.

    Raises :class:`ArchiveError` for a directory that is missing, damaged, or of an archive with compressed records.
    """

    def __init__(self, stream: BinaryIO, known: Layouts) -> None:
        super().__init__(stream)
        self.has_read_headers = False  # local ones, which the layout does not show
        raw = self.read(self.start, self.directory_nbytes)
        name = raw[ENTRY.size : raw.find(b"/", ENTRY.size)] if b"/" in raw[ENTRY.size :] else b""
        self.root = name.decode("utf-8", "backslashreplace")
        # files whose directories differ in the root's name alone share one layout
        is_plain = name.isascii() and raw.count(name + b"/") == self.count
        where = self.start, len(raw), self.count, hashlib.blake2b(raw.replace(name + b"/", b"/")).digest()
        same = known.get(where) if is_plain else None
        self.layout = same or self._parsed()
        if is_plain:
            known[where] = self.layout
        if self.read(0, 4) != b"PK\x03\x04":
            raise ArchiveError("a zip archive that does not begin with a record")

    def _parsed(self) -> Layout:
        records = {record.name: record for record in self.entries()}
        if len(records) != self.count:
            raise ArchiveError(f"{len(records)} records, but its end counts {self.count}: damaged, or two of one name")
        for name, nbytes, _, header, _, is_stored in records.values():
            if not is_stored:  # tensors are read by their offsets, which would give other bytes
                raise ArchiveError(f"a repacked zip archive: {name} is compressed")
            if (reach := header + HEADER.size + nbytes) > self.start:
                raise ArchiveError(f"record {name} reaches to byte {reach}, into the directory")
        if len({name.lower() for name in records}) != len(records):
            raise ArchiveError("two records of one name but for upper and lower case")
        sizes = sorted((each.header, HEADER.size + len(each.name.encode()) + each.nbytes) for each in records.values())
        headers = [header for header, _ in sizes]
        if any(first + nbytes > second for (first, nbytes), (second, _) in pairwise(sizes)):
            raise ArchiveError("two records overlap")
        pickles = [name for name in records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ArchiveError(f"a zip archive with {len(pickles)} pickles")
        if pickles[0] != f"{self.root}/data.pkl" or not next(iter(records)).startswith(f"{self.root}/"):
            raise ArchiveError("its first record is not in the folder of its pickle")
        root = f"{self.root}/"
        below = {name[len(root) :] if name.startswith(root) else f"../{name}": each for name, each in records.items()}
        return Layout(below, [*headers, self.start])

    def find(self, name: str) -> ArchiveRecord | None:
        """The record of a name below :attr:`root`."""
        return self.layout.records.get(name)

    def read_record(self, name: str, most_nbytes: int) -> bytes:
        """A small record's data; :class:`ArchiveError` if it is missing, larger, or contradicts its checksum."""
        record = self.find(name)
        if record is None or record.nbytes > most_nbytes:
            size = "no record" if record is None else f"{record.nbytes} bytes in record"
            raise ArchiveError(f"{size} {name}, where at most {most_nbytes} bytes can be read")
        offset = self.offset(record)
        *_, name_nbytes, extra_nbytes = HEADER.unpack(self.read(record.header, HEADER.size))
        if record.header + HEADER.size + name_nbytes + extra_nbytes != offset:
            raise ArchiveError(f"the header of record {name} says that its data is elsewhere")
        raw = self.read(offset, record.nbytes)
        if record.crc32 and zlib.crc32(raw) != record.crc32:  # 0: torch.serialization.set_crc32_options(False)
            raise ArchiveError(f"Bad CRC-32 for record {name}")
        return raw

    def offset(self, record: ArchiveRecord) -> int:
        """Offset of a record's first byte of data.

        Its local header need not be read where torch's alignment leads to the offset that follows from the next header.
        """
        name, nbytes, _, header, flags, _ = record
        start = header + HEADER.size + len(name.encode()) + 4  # as getPadding (inline_container.cc) counts
        descriptor = 16 if flags & SIZES_FOLLOW else 0
        if nbytes >= MAX32 or header >= MAX32:
            start += 4 + 16 * (nbytes >= MAX32) + 8 * (header >= MAX32)
            descriptor += descriptor // 2
        offset = -(-start // _ALIGNMENT) * _ALIGNMENT
        following = self.layout.ends[bisect_right(self.layout.ends, header)]
        return offset if offset + nbytes + descriptor == following else self._offset_by_header(record, following)

    def _offset_by_header(self, record: ArchiveRecord, following: int) -> int:
        self.has_read_headers = True
        signature, *_, name_nbytes, extra_nbytes = HEADER.unpack(self.read(record.header, HEADER.size))
        found = _decoded(self.read(record.header + HEADER.size, name_nbytes), record.flags)
        name = f"{self.root}/{record.name.partition('/')[2]}"  # its own, where the layout is another file's
        if signature != b"PK\x03\x04" or found != name:
            raise ArchiveError(f"the header of record {name} at byte {record.header} is damaged")
        offset: int = record.header + HEADER.size + name_nbytes + extra_nbytes
        if offset + record.nbytes > following:
            raise ArchiveError(f"record {name} reaches into the next one, at byte {following}")
        return offset


def _decoded(name: bytes, flags: int) -> str:
    """A record's name."""
    return name.decode("utf-8" if flags & 0x0800 else "cp437", "backslashreplace")


def _wide(extra: bytes, *fields: int) -> list[int]:
    """The fields, those that are all ones taken from the block of 64-bit values in ``extra``."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == ZIP64:
            values = (value for (value,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + nbytes // 8 * 8]))
            return [next(values, MAX32) if field == MAX32 else field for field in fields]
        at += 4 + nbytes
    return list(fields)
