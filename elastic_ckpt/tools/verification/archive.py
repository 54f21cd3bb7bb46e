"""Strict reader of a ``torch.save`` file's zip archive: every byte but the data must be as a writer writes it.

:mod:`elastic_ckpt.formats.torch_archive.directory` and torch ignore much; here, a flipped bit anywhere is a problem.
Nothing is decompressed.

Layout: records (header, extra field, data and, in torch's archives, a data descriptor), directory, 64-bit end of the
directory, its locator, end of the directory. torch pads the extra field so that data begins at a multiple of 64
bytes, and always writes the 64-bit end. Source: PKWARE's APPNOTE 6.3.10; torch writes with miniz.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

from elastic_ckpt.formats.torch_archive import directory
from elastic_ckpt.formats.torch_archive.directory import MAX16, MAX32, ArchiveError, ArchiveRecord, Listing
from elastic_ckpt.tools.findings import DIRECTORY, HEADER, PADDING

#: Kind of a finding, and its text.
Problem = tuple[str, str]

_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
#: Block of an extra field: torch's padding "FB", filled with Z.
_TORCH_PADDING, _FILL = 0x4246, b"Z"
#: What miniz writes at bytes 12 to 16 of the 64-bit end: made by version 3.0 on Unix, needs version 4.5.
_END64_VERSIONS = (0x031E, 0x002D)
#: Flags of torch's records: names are UTF-8; sizes follow the data, if any.
_TORCH_FLAGS, _TORCH_FLAGS_EMPTY = 0x0808, 0x0800


@dataclass(frozen=True, slots=True)
class Record:
    """Byte range of a record's data, its CRC32 (0 may mean none) by the directory, byte offset of its entry there."""

    name: str
    offset: int
    nbytes: int
    crc32: int
    entry_offset: int = -1


@dataclass(frozen=True, slots=True)
class Archive:
    """Records in file order, if their data can be located; all problems; whether most entries are as torch's."""

    records: tuple[Record, ...] = ()
    problems: tuple[Problem, ...] = ()
    by_torch: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the directory.

    Attributes:
        record: what readers take from it.
        made_by, common, sizes: versions, and those as in the record's header: needed version, flags, method, time,
            date; CRC32 and both sizes.
        disk, internal, external: disk, internal and external attributes.
        name, extra, comment: bytes.
    """

    record: ArchiveRecord
    made_by: int
    common: tuple[int, ...]
    sizes: tuple[int, int, int]
    disk: int
    internal: int
    external: int
    name: bytes
    extra: bytes
    comment: bytes

    @classmethod
    def read(cls, stream: BinaryIO, record: ArchiveRecord) -> _Entry:
        fields = directory.ENTRY.unpack(_read(stream, record.entry, directory.ENTRY.size))
        _, made_by, *common, crc32, packed, _, name, extra, comment, disk, internal, external, _ = fields
        sizes = crc32, record.nbytes if record.is_stored else packed, record.nbytes
        rest = [stream.read(nbytes) for nbytes in (name, extra, comment)]
        return cls(record, made_by, tuple(common), sizes, disk, internal, external, *rest)

    def unlike_torch(self) -> list[str]:
        """Fields that differ from what ``torch.save`` always writes."""
        needed, flags, _, time, date = self.common
        zero = {
            "comment": self.comment,
            "disk": self.disk,
            "external attributes": self.external,
            "internal attributes": self.internal,
            "version made by": self.made_by,
            "version needed": needed,
            "time": time,
            "date": date,
            "flags": flags ^ (_TORCH_FLAGS if self.record.nbytes else _TORCH_FLAGS_EMPTY),
        }
        return [what for what, value in zero.items() if value]


def read_archive(stream: BinaryIO) -> Archive:
    """Read and check everything in an archive but the data; :class:`OSError` if the file cannot be read."""
    try:
        listing = Listing(stream)
        entries = [_Entry.read(stream, record) for record in list(listing.entries())]
    except ArchiveError as error:
        text = f"the directory cannot be read: {error}; its records were not checked"
        return Archive(problems=((DIRECTORY, text),))
    by_torch = 2 * sum(not entry.unlike_torch() for entry in entries) > len(entries)
    problems = list(_directory_problems(stream, listing, entries))
    for entry in entries:
        problems += _entry_problems(entry, by_torch)
    records = []
    entries.sort(key=lambda entry: entry.record.header)
    ends = [entry.record.header for entry in entries] + [listing.start]
    if entries and ends[0]:
        problems.append((HEADER, f"{ends[0]} bytes before the first record"))
    for entry, (begin, following) in zip(entries, pairwise(ends), strict=True):
        name, nbytes, crc32 = entry.record[:3]
        if begin > listing.start - directory.HEADER.size:
            problems.append((HEADER, f"record {name} begins at byte {begin}, outside of the records"))
            continue
        fields = directory.HEADER.unpack(_read(stream, begin, directory.HEADER.size))
        *_, name_nbytes, extra_nbytes = fields
        problems += _header_problems(entry, fields, stream.read(name_nbytes))
        problems += _extra_problems(entry, stream.read(extra_nbytes), by_torch, "header", HEADER)
        offset = begin + directory.HEADER.size + name_nbytes + extra_nbytes
        end = offset + entry.sizes[1]
        if end > following:
            problems.append((HEADER, f"record {name} reaches to byte {end}, the next one begins at {following}"))
            continue
        problems += _descriptor_problems(entry, _read(stream, end, min(following - end, 64)), following - end)
        if entry.record.is_stored:
            records.append(Record(name, offset, nbytes, crc32, entry.record.entry))
    return Archive(tuple(records), tuple(problems), by_torch)


def _read(stream: BinaryIO, offset: int, nbytes: int) -> bytes:
    stream.seek(offset)
    return stream.read(nbytes)


def _directory_problems(stream: BinaryIO, listing: Listing, entries: Sequence[_Entry]) -> Iterator[Problem]:
    """Problems of the end of the directory, which a 64-bit end may precede."""
    count, start, nbytes = len(entries), listing.start, listing.directory_nbytes
    tail = _read(stream, start + nbytes, listing.nbytes)
    sizes = (min(count, MAX16), min(count, MAX16), min(nbytes, MAX32), min(start, MAX32))
    narrow = directory.END.pack(b"PK\x05\x06", 0, 0, *sizes, len(listing.comment)) + listing.comment
    end64 = directory.END64.size - 12, *_END64_VERSIONS, 0, 0, count, count, nbytes, start
    locator = directory.LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1)
    wide = directory.END64.pack(b"PK\x06\x06", *end64) + locator + narrow
    if len(tail) == len(wide) and tail != wide and tail[:12] + wide[12:16] + tail[16:] == wide:
        made, needed = struct.unpack_from("<2H", tail, 12)
        yield PADDING, f"versions {made:#06x} and {needed:#06x} in the 64-bit end of the directory"
    elif tail not in (narrow, wide):
        yield DIRECTORY, f"its end contradicts the directory: {count} records in {nbytes} bytes from byte {start} on"
    if len({entry.record.name for entry in entries}) < count:
        yield DIRECTORY, "two records have the same name"


def _entry_problems(entry: _Entry, by_torch: bool) -> Iterator[Problem]:
    name = entry.record.name
    if not entry.record.is_stored:
        yield DIRECTORY, f"record {name} is compressed, or its sizes differ: readers take its bytes as they are"
    unlike = entry.unlike_torch() if by_torch else []
    if "flags" in unlike or "disk" in unlike:
        yield DIRECTORY, f"record {name}: {', '.join(unlike)} not as torch writes it"
    elif unlike:
        yield PADDING, f"record {name}: {', '.join(unlike)} not as torch writes it; no reader looks at this"
    yield from _extra_problems(entry, entry.extra, by_torch, "entry", DIRECTORY)


def _header_problems(entry: _Entry, fields: tuple[Any, ...], name: bytes) -> Iterator[Problem]:
    header = f"the header of record {entry.record.name}:"
    if fields[0] != b"PK\x03\x04":
        yield HEADER, f"{header} it has no signature"
    if name != entry.name:
        yield HEADER, f"{header} its name there is {name.decode('utf-8', 'backslashreplace')}"
    what = ("version", "flags", "method", "time", "date")
    for each, here, there in zip(what, fields[1:6], entry.common, strict=True):
        if here != there:
            yield HEADER, f"{header} its {each} there is {here}, in the directory {there}"
    may_be_zero = entry.record.flags & directory.SIZES_FOLLOW and not any(fields[6:9])
    if fields[6:9] != tuple(min(size, MAX32) for size in entry.sizes) and not may_be_zero:
        yield HEADER, f"{header} its CRC32 and sizes there are {fields[6:9]}, in the directory {entry.sizes}"


def _extra_problems(entry: _Entry, extra: bytes, by_torch: bool, where: str, kind: str) -> Iterator[Problem]:
    """Problems of the extra field of a record's header, or of its entry in the directory."""
    name, (_, *sizes) = entry.record.name, entry.sizes
    blocks, position = [], 0
    while position + 4 <= len(extra):
        block, nbytes = struct.unpack_from("<2H", extra, position)
        blocks.append((block, extra[position + 4 : position + 4 + nbytes]))
        position += 4 + nbytes
    if position != len(extra):
        yield kind, f"the {where} of record {name}: its extra fields do not add up"
        return
    for block, content in blocks:
        if block == directory.ZIP64:
            wide = {value for (value,) in struct.iter_unpack("<Q", content[: len(content) // 8 * 8])}
            if len(content) % 8 or wide - {0, *sizes, entry.record.header}:
                yield kind, f"the {where} of record {name}: its 64-bit sizes are others than in the directory"
        elif block == _TORCH_PADDING:
            if content.strip(_FILL):
                yield PADDING, f"the padding before record {name} has changed; no reader looks at this"
        elif by_torch:
            yield PADDING, f"an extra field {block:#06x} in the {where} of record {name}, as torch writes none"


def _descriptor_problems(entry: _Entry, raw: bytes, nbytes: int) -> Iterator[Problem]:
    """Problems of the ``nbytes`` between a record's data and the next record; ``raw``: the first of them."""
    fitting = [_WIDE_DESCRIPTOR.pack(b"PK\x07\x08", *entry.sizes)]
    if max(entry.sizes) <= MAX32:
        fitting.append(_DESCRIPTOR.pack(b"PK\x07\x08", *entry.sizes))
    if not entry.record.flags & directory.SIZES_FOLLOW:
        if nbytes:
            yield HEADER, f"{nbytes} bytes behind record {entry.record.name} belong to nothing"
    elif raw not in (*fitting, *(descriptor[4:] for descriptor in fitting)):
        yield HEADER, f"CRC32 and sizes behind record {entry.record.name} are others than in the directory"
