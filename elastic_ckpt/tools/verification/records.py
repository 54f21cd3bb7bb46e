"""The headers of a zip archive's records, held against its directory.

Each record is a header, an extra field, the data, and, in archives that torch writes, a data descriptor. Between two
records nothing may lie. torch pads the extra field, so that data begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastic_ckpt.tools.verification.archive import ZIP64, Directory, Entry, Problem, Read, extra_blocks
from elastic_ckpt.tools.verification.findings import HEADER, PADDING

_HEADER = struct.Struct("<4s5H3L2H")
_DESCRIPTOR, _WIDE_DESCRIPTOR = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
_MAX32 = 0xFFFFFFFF
#: Flag: sizes and CRC32 follow the data, and the header may have zeros for them.
_SIZES_FOLLOW = 0x0008
#: torch's padding: block "FB", filled with Z.
_TORCH_PADDING = 0x4246
_FILL = b"Z"


@dataclass(frozen=True, slots=True)
class Record:
    """The data of one record: its name, where it lies, and the CRC32 that the directory has for it."""

    name: str
    offset: int
    nbytes: int
    crc32: int


def read_records(read: Read, directory: Directory, problems: list[Problem]) -> tuple[Record, ...]:
    """Read and check the header of every record.

    Args:
        read: reads from the file.
        directory: its directory.
        problems: what is wrong is added here.

    Returns:
        The records whose data can be found, in the order of the file.
    """
    entries = sorted(directory.entries, key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in entries] + [directory.start]
    if entries and entries[0].header_offset:
        problems.append((HEADER, f"{entries[0].header_offset} bytes before the first record"))
    found = []
    for entry, (start, following) in zip(entries, pairwise(ends), strict=True):
        raw = read(start, _HEADER.size + len(entry.name) + 256)
        if len(raw) < _HEADER.size:
            problems.append((HEADER, f"record {entry.shown} begins at byte {start}, behind the end of the file"))
            continue
        fields = _HEADER.unpack_from(raw)
        name_nbytes, extra_nbytes = fields[-2:]
        data = start + _HEADER.size + name_nbytes + extra_nbytes
        raw = read(start, data - start)
        name = raw[_HEADER.size : _HEADER.size + name_nbytes]
        differing = list(_differing(entry, fields, name))
        problems += [(HEADER, f"the header of record {entry.shown}: {what}") for what in differing]
        problems += _extra(entry, raw[_HEADER.size + name_nbytes :], directory.by_torch)
        end = data + entry.packed_nbytes
        if end > following:
            problems.append((HEADER, f"record {entry.shown} reaches to byte {end}, the next one begins at {following}"))
            continue
        problems += _tail(entry, read(end, min(following - end, 64)), following - end)
        if entry.method == 0:
            found.append(Record(entry.shown, data, entry.nbytes, entry.crc32))
    return tuple(found)


def _differing(entry: Entry, fields: tuple[Any, ...], name: bytes) -> Iterator[str]:
    """In what the header of a record contradicts the directory."""
    signature, needed, flags, method, time, date, crc32, packed, nbytes = fields[:9]
    if signature != b"PK\x03\x04":
        yield "it has no signature"
    if name != entry.name:
        yield f"its name there is {name.decode('utf-8', 'backslashreplace')}"
    for what, here, listed in (
        ("version", needed, entry.needed),
        ("flags", flags, entry.flags),
        ("method", method, entry.method),
        ("time", time, entry.time),
        ("date", date, entry.date),
    ):
        if here != listed:
            yield f"its {what} there is {here}, in the directory {listed}"
    listed_sizes = (entry.crc32, entry.packed_nbytes, entry.nbytes)
    short = tuple(min(size, _MAX32) for size in listed_sizes)
    if (crc32, packed, nbytes) != short and not (entry.flags & _SIZES_FOLLOW and (crc32, packed, nbytes) == (0, 0, 0)):
        yield f"its CRC32 and sizes there are {(crc32, packed, nbytes)}, in the directory {listed_sizes}"


def _extra(entry: Entry, extra: bytes, by_torch: bool) -> Iterator[Problem]:
    blocks = extra_blocks(extra)
    if blocks is None:
        yield HEADER, f"the header of record {entry.shown}: its extra fields do not add up"
        return
    for kind, content in blocks:
        if kind == ZIP64:
            sizes = {value for (value,) in struct.iter_unpack("<Q", content[: len(content) // 8 * 8])}
            if len(content) % 8 or sizes - {0, entry.nbytes, entry.packed_nbytes, entry.header_offset}:
                yield HEADER, f"the header of record {entry.shown}: its 64-bit sizes are others than in the directory"
        elif kind == _TORCH_PADDING:
            if content.strip(_FILL):
                yield PADDING, f"the padding before record {entry.shown} has changed; no reader looks at this"
        elif by_torch:
            yield PADDING, f"an extra field {kind:#06x} before record {entry.shown}, as torch writes none"


def _tail(entry: Entry, raw: bytes, nbytes: int) -> Iterator[Problem]:
    """What lies between the data of a record and the next record."""
    sizes = (entry.crc32, entry.packed_nbytes, entry.nbytes)
    signature = b"PK\x07\x08"
    fitting = {_WIDE_DESCRIPTOR.pack(signature, *sizes)}
    if entry.nbytes <= _MAX32 and entry.packed_nbytes <= _MAX32:
        fitting.add(_DESCRIPTOR.pack(signature, *sizes))
    if entry.flags & _SIZES_FOLLOW:
        if raw not in fitting | {descriptor[4:] for descriptor in fitting}:
            yield HEADER, f"CRC32 and sizes behind record {entry.shown} are others than in the directory"
    elif nbytes:
        yield HEADER, f"{nbytes} bytes behind record {entry.shown} belong to nothing"
