"""Strict reader of a ``torch.save`` file's zip archive: every byte but the data must be as a writer writes it.

``zipfile`` and torch ignore much; here, a flipped bit anywhere is a problem: what ``zipfile`` reads is packed again and
compared with the file. Nothing is decompressed.

Layout: records (header, extra field, data and, in torch's archives, a data descriptor), directory, 64-bit end of the
directory, its locator, end of the directory. torch pads the extra field so that data begins at a multiple of 64
bytes, and always writes the 64-bit end. Source: PKWARE's APPNOTE 6.3.10; torch writes with miniz.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO
from zipfile import ZipInfo

from elastic_ckpt.tools.findings import DIRECTORY, HEADER, PADDING

#: Kind of a finding, and its text.
Problem = tuple[str, str]

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s4B4H3L5H2L")
_HEADER = struct.Struct("<4s5H3L2H")
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
#: Blocks of an extra field: 64-bit sizes; torch's padding "FB", filled with Z.
_ZIP64, _TORCH_PADDING, _FILL = 0x0001, 0x4246, b"Z"
#: What miniz writes at bytes 12 to 16 of the 64-bit end: made by version 3.0 on Unix, needs version 4.5.
_END64_VERSIONS = (0x031E, 0x002D)
#: Flag: CRC32 and sizes follow the data, and may be zero in the header.
_SIZES_FOLLOW = 0x0008
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


def read_archive(stream: BinaryIO) -> Archive:
    """Read and check everything in an archive but the data; :class:`OSError` if the file cannot be read."""
    try:
        with zipfile.ZipFile(stream) as archive:
            entries, start, comment = archive.infolist(), archive.start_dir, archive.comment
    except OSError:
        raise
    except Exception as error:  # a damaged directory can make zipfile raise anything
        what = f"the directory cannot be read: {type(error).__name__}: {error}"
        if str(error) == "File is not a zip file":
            what = "no end of the directory: the file is truncated, or no zip archive"
        return Archive(problems=((DIRECTORY, f"{what}; its records were not checked"),))
    packed = [_pack(entry) for entry in entries]
    offsets = list(accumulate(map(len, packed), initial=start))
    by_torch = 2 * sum(not _unlike_torch(entry) for entry in entries) > len(entries)
    problems = list(_directory_problems(stream, b"".join(packed), entries, start, comment))
    for entry in entries:
        problems += _entry_problems(entry, by_torch)
    records = []
    found = sorted(zip(entries, offsets, strict=False), key=lambda pair: pair[0].header_offset)
    ends = [entry.header_offset for entry, _ in found] + [start]
    if entries and ends[0]:
        problems.append((HEADER, f"{ends[0]} bytes before the first record"))
    for (entry, entry_offset), (begin, following) in zip(found, pairwise(ends), strict=True):
        if not 0 <= begin <= start - _HEADER.size:
            problems.append((HEADER, f"record {entry.orig_filename} begins at byte {begin}, outside of the records"))
            continue
        fields = _HEADER.unpack(_read(stream, begin, _HEADER.size))
        name, extra = stream.read(fields[-2]), stream.read(fields[-1])
        problems += _header_problems(entry, fields, name)
        problems += _extra_problems(entry, extra, by_torch)
        offset = begin + _HEADER.size + fields[-2] + fields[-1]
        end = offset + entry.compress_size
        if end > following:
            what = f"record {entry.orig_filename} reaches to byte {end}, the next one begins at {following}"
            problems.append((HEADER, what))
            continue
        problems += _descriptor_problems(entry, _read(stream, end, min(following - end, 64)), following - end)
        if entry.compress_type == zipfile.ZIP_STORED:
            records.append(Record(entry.orig_filename, offset, entry.file_size, entry.CRC, entry_offset))
    return Archive(tuple(records), tuple(problems), by_torch)


def _read(stream: BinaryIO, offset: int, nbytes: int) -> bytes:
    stream.seek(offset)
    return stream.read(nbytes)


def _pack(entry: ZipInfo) -> bytes:
    """The bytes that the entry must have in the directory."""
    name = _name(entry)
    sizes = [min(size, _MAX32) for size in (entry.compress_size, entry.file_size)]
    return b"".join(
        (
            _ENTRY.pack(
                b"PK\x01\x02",
                *(entry.create_version, entry.create_system, entry.extract_version, entry.reserved),
                *(entry.flag_bits, entry.compress_type, *_time_and_date(entry)),
                *(entry.CRC, *sizes, len(name), len(entry.extra), len(entry.comment)),
                *(entry.volume, entry.internal_attr, entry.external_attr, min(max(entry.header_offset, 0), _MAX32)),
            ),
            *(name, entry.extra, entry.comment),
        )
    )


def _name(entry: ZipInfo) -> bytes:
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x0800 else "cp437")


def _time_and_date(entry: ZipInfo) -> tuple[int, int]:
    year, month, day, hour, minute, second = entry.date_time
    return hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day


def _directory_problems(
    stream: BinaryIO, packed: bytes, entries: Sequence[ZipInfo], start: int, comment: bytes
) -> Iterator[Problem]:
    """Problems of the whole directory and its end, which a 64-bit end may precede."""
    if _read(stream, start, len(packed)) != packed:
        yield DIRECTORY, "the directory contradicts itself"
    tail = stream.read()
    count, nbytes = len(entries), len(packed)
    sizes = (min(count, _MAX16), min(count, _MAX16), min(nbytes, _MAX32), min(start, _MAX32))
    narrow = _END.pack(b"PK\x05\x06", 0, 0, *sizes, len(comment)) + comment
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, *_END64_VERSIONS, 0, 0, count, count, nbytes, start)
    wide += _LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1) + narrow
    if len(tail) == len(wide) and tail != wide and tail[:12] + wide[12:16] + tail[16:] == wide:
        made, needed = struct.unpack_from("<2H", tail, 12)
        yield PADDING, f"versions {made:#06x} and {needed:#06x} in the 64-bit end of the directory"
    elif tail not in (narrow, wide):
        yield DIRECTORY, f"its end contradicts the directory: {count} records in {nbytes} bytes from byte {start} on"
    if len({entry.orig_filename for entry in entries}) < count:
        yield DIRECTORY, "two records have the same name"


def _unlike_torch(entry: ZipInfo) -> list[str]:
    """Fields of an entry that differ from what ``torch.save`` always writes."""
    time, date = _time_and_date(entry)
    zero = {
        "comment": entry.comment,
        "disk": entry.volume,
        "external attributes": entry.external_attr,
        "internal attributes": entry.internal_attr,
        "version made by": entry.create_version or entry.create_system,
        "version needed": entry.reserved << 8 | entry.extract_version,
        "time": time,
        "date": date,
        "flags": entry.flag_bits ^ (_TORCH_FLAGS if entry.file_size else _TORCH_FLAGS_EMPTY),
    }
    return [what for what, value in zero.items() if value]


def _entry_problems(entry: ZipInfo, by_torch: bool) -> Iterator[Problem]:
    name = entry.orig_filename
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        yield DIRECTORY, f"record {name} is compressed, or its sizes differ: readers take its bytes as they are"
    unlike = _unlike_torch(entry) if by_torch else []
    if "flags" in unlike or "disk" in unlike:
        yield DIRECTORY, f"record {name}: {', '.join(unlike)} not as torch writes it"
    elif unlike:
        yield PADDING, f"record {name}: {', '.join(unlike)} not as torch writes it; no reader looks at this"


def _header_problems(entry: ZipInfo, fields: tuple[Any, ...], name: bytes) -> Iterator[Problem]:
    header = f"the header of record {entry.orig_filename}:"
    if fields[0] != b"PK\x03\x04":
        yield HEADER, f"{header} it has no signature"
    if name != _name(entry):
        yield HEADER, f"{header} its name there is {name.decode('utf-8', 'backslashreplace')}"
    version = entry.reserved << 8 | entry.extract_version
    listed = (version, entry.flag_bits, entry.compress_type, *_time_and_date(entry))
    for what, here, there in zip(("version", "flags", "method", "time", "date"), fields[1:6], listed, strict=True):
        if here != there:
            yield HEADER, f"{header} its {what} there is {here}, in the directory {there}"
    sizes = (entry.CRC, entry.compress_size, entry.file_size)
    may_be_zero = entry.flag_bits & _SIZES_FOLLOW and not any(fields[6:9])
    if fields[6:9] != tuple(min(size, _MAX32) for size in sizes) and not may_be_zero:
        yield HEADER, f"{header} its CRC32 and sizes there are {fields[6:9]}, in the directory {sizes}"


def _extra_problems(entry: ZipInfo, extra: bytes, by_torch: bool) -> Iterator[Problem]:
    header = f"the header of record {entry.orig_filename}:"
    blocks, position = [], 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        blocks.append((kind, extra[position + 4 : position + 4 + nbytes]))
        position += 4 + nbytes
    if position != len(extra):
        yield HEADER, f"{header} its extra fields do not add up"
        return
    for kind, content in blocks:
        if kind == _ZIP64:
            wide = {value for (value,) in struct.iter_unpack("<Q", content[: len(content) // 8 * 8])}
            if len(content) % 8 or wide - {0, entry.compress_size, entry.file_size, entry.header_offset}:
                yield HEADER, f"{header} its 64-bit sizes are others than in the directory"
        elif kind == _TORCH_PADDING:
            if content.strip(_FILL):
                yield PADDING, f"the padding before record {entry.orig_filename} has changed; no reader looks at this"
        elif by_torch:
            yield PADDING, f"an extra field {kind:#06x} before record {entry.orig_filename}, as torch writes none"


def _descriptor_problems(entry: ZipInfo, raw: bytes, nbytes: int) -> Iterator[Problem]:
    """Problems of the ``nbytes`` between a record's data and the next record; ``raw``: the first of them."""
    sizes = (entry.CRC, entry.compress_size, entry.file_size)
    fitting = [_WIDE_DESCRIPTOR.pack(b"PK\x07\x08", *sizes)]
    if max(sizes) <= _MAX32:
        fitting.append(_DESCRIPTOR.pack(b"PK\x07\x08", *sizes))
    if not entry.flag_bits & _SIZES_FOLLOW:
        if nbytes:
            yield HEADER, f"{nbytes} bytes behind record {entry.orig_filename} belong to nothing"
    elif raw not in (*fitting, *(descriptor[4:] for descriptor in fitting)):
        yield HEADER, f"CRC32 and sizes behind record {entry.orig_filename} are others than in the directory"
