"""The directory of a zip archive, read strictly: every byte of it must be what a writer would have put there.

``zipfile`` and torch pass over much that they do not need. Here, a bit that has turned anywhere in the directory is a
problem, since whatever turned it may have turned others. Nothing is decompressed. Pure but for the given ``read``.

Layout: records (:mod:`elastic_ckpt.tools.verification.records`), directory, end of the directory in 64 bits, its
locator, end of the directory. Source: PKWARE's APPNOTE 6.3.10; torch writes it with miniz, always in the 64-bit form.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.tools.verification.findings import DIRECTORY, PADDING

#: ``read(offset, nbytes)``: these bytes, or as many as there are.
Read = Callable[[int, int], bytes]
#: Code of a finding, and what is wrong.
Problem = tuple[str, str]

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_MOST_COMMENT_NBYTES = 0xFFFF
_MOST_DIRECTORY_NBYTES = 1 << 28
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
#: Extra field that holds what 32 bits cannot.
ZIP64 = 0x0001
#: What miniz writes into the 64-bit end: made by version 3.0 on Unix, needs version 4.5.
_END64_VERSIONS = (0x031E, 0x002D)
#: Flags of torch's records: names are UTF-8; and, unless there is no data, sizes follow it.
_TORCH_FLAGS, _TORCH_FLAGS_EMPTY = 0x0808, 0x0800
_STORED = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What the directory says of one record.

    Attributes:
        name: as in the file.
        needed, flags, method, time, date: of its header too.
        crc32: of its data; 0 may mean that none was taken.
        packed_nbytes, nbytes: of its data, in the file and unpacked.
        header_offset: where its own header lies.
        unused: fields of the directory alone that no reader needs: name -> value.
    """

    name: bytes
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    packed_nbytes: int
    nbytes: int
    header_offset: int
    unused: tuple[tuple[str, int], ...]

    @property
    def shown(self) -> str:
        """Its name, for a message."""
        return self.name.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory of an archive, as far as it can be read.

    Attributes:
        entries: in directory order.
        start: where it begins, which is where the records end.
        problems: what is wrong with it.
        by_torch: whether its entries look like those that ``torch.save`` writes.
    """

    entries: tuple[Entry, ...]
    start: int
    problems: tuple[Problem, ...]
    by_torch: bool


@dataclass(frozen=True, slots=True)
class _End:
    """Where the directory is, according to one of its two end records."""

    entries: int
    nbytes: int
    start: int


def read_directory(read: Read, file_nbytes: int) -> Directory:
    """Read and check the directory of an archive.

    Args:
        read: reads from the file.
        file_nbytes: its size.
    """
    problems: list[Problem] = []
    end = _find_end(read, file_nbytes, problems)
    if end is None:
        return Directory((), file_nbytes, tuple(problems), False)
    if end.nbytes > _MOST_DIRECTORY_NBYTES:
        problems.append((DIRECTORY, f"a directory of {end.nbytes} bytes is not read"))
        return Directory((), end.start, tuple(problems), False)
    entries = tuple(_entries(read(end.start, end.nbytes), end, problems))
    if len(entries) != end.entries:
        problems.append((DIRECTORY, f"{end.entries} records according to its end, {len(entries)} in the directory"))
    twice = len({entry.name for entry in entries}) < len(entries)
    if twice:
        problems.append((DIRECTORY, "two records have the same name"))
    by_torch = 2 * sum(_is_torchs(entry) for entry in entries) > len(entries)
    for entry in entries:
        problems += _judged(entry, by_torch)
    return Directory(entries, end.start, tuple(problems), by_torch)


def _find_end(read: Read, file_nbytes: int, problems: list[Problem]) -> _End | None:
    """The end record, compared with its 64-bit form where there is one."""
    tail_start = max(0, file_nbytes - _END.size - _MOST_COMMENT_NBYTES)
    tail = read(tail_start, file_nbytes - tail_start)
    place = len(tail) - _END.size
    while place >= 0:
        # a record of an archive may hold another archive: the end is the one that reaches to the end of the file
        fields = _END.unpack_from(tail, place)
        if fields[0] == b"PK\x05\x06" and place + _END.size + fields[7] == len(tail):
            break
        place = tail.rfind(b"PK\x05\x06", 0, place + 3)
    if place < 0:
        problems.append((DIRECTORY, "no end of the directory: the file is truncated, or no zip archive"))
        return None
    _, disk, start_disk, here, count, nbytes, start, _ = fields
    if disk or start_disk or here != count:
        problems.append((DIRECTORY, "its end says that the archive has several parts"))
    position = tail_start + place
    narrow = _End(count, nbytes, start)
    wide, before = _wide_end(read, position, problems)
    if wide is None:
        return _plausible(read, [narrow], before, problems)
    for what, short, long, most in (
        ("number of records", count, wide.entries, _MAX16),
        ("size of the directory", nbytes, wide.nbytes, _MAX32),
        ("place of the directory", start, wide.start, _MAX32),
    ):
        if short != min(long, most):
            problems.append((DIRECTORY, f"its two ends differ in the {what}: {short} and {long}"))
    return _plausible(read, [wide, narrow], before, problems)


def _wide_end(read: Read, end_position: int, problems: list[Problem]) -> tuple[_End | None, int]:
    """The 64-bit end, and where the directory must end."""
    raw = read(max(0, end_position - _LOCATOR.size), _LOCATOR.size)
    if len(raw) < _LOCATOR.size or not raw.startswith(b"PK\x06\x07"):
        return None, end_position
    _, disk, position, disks = _LOCATOR.unpack(raw)
    if disk or disks != 1:
        problems.append((DIRECTORY, "the locator of its end says that the archive has several parts"))
    expected = end_position - _LOCATOR.size - _END64.size
    raw = read(max(0, expected), _END64.size)
    if position != expected or not raw.startswith(b"PK\x06\x06"):
        problems.append((DIRECTORY, f"no 64-bit end of the directory at byte {position}, where its locator points"))
        return None, expected
    _, nbytes, made, needed, disk, start_disk, here, count, size, start = _END64.unpack(raw)
    if nbytes != _END64.size - 12 or disk or start_disk or here != count:
        problems.append((DIRECTORY, "the 64-bit end of the directory contradicts itself"))
    if (made, needed) != _END64_VERSIONS:
        problems.append((PADDING, f"versions {made:#06x} and {needed:#06x} in the 64-bit end of the directory"))
    return _End(count, size, start), expected


def _plausible(read: Read, ends: list[_End], before: int, problems: list[Problem]) -> _End | None:
    """The first end that points to a directory that reaches up to the end records."""
    for end in ends:
        if end.start + end.nbytes == before and (not end.nbytes or read(end.start, 4) == b"PK\x01\x02"):
            return end
    for end in ends:
        if end.start + end.nbytes <= before and read(end.start, 4) == b"PK\x01\x02":
            gap = before - end.start - end.nbytes
            problems.append((DIRECTORY, f"{gap} bytes between the directory and its end"))
            return end
    problems.append((DIRECTORY, f"no directory at byte {ends[0].start}, where its end says that it is"))
    return None


def _entries(raw: bytes, end: _End, problems: list[Problem]) -> Iterator[Entry]:
    position = 0
    while position < len(raw):
        if position + _ENTRY.size > len(raw):
            problems.append((DIRECTORY, f"{len(raw) - position} bytes behind its last record"))
            return
        fields = _ENTRY.unpack_from(raw, position)
        name_nbytes, extra_nbytes, comment_nbytes = fields[10:13]
        following = position + _ENTRY.size + name_nbytes + extra_nbytes + comment_nbytes
        if fields[0] != b"PK\x01\x02":
            problems.append((DIRECTORY, f"no record at byte {end.start + position}"))
            if raw[following : following + 4] not in (b"PK\x01\x02", b""):
                return  # more than its signature is wrong: where the next one begins is not known
        if following > len(raw):
            problems.append((DIRECTORY, f"the record at byte {end.start + position} is longer than the directory"))
            return
        name_start = position + _ENTRY.size
        extra_start = name_start + name_nbytes
        yield _entry(fields, raw[name_start:extra_start], raw[extra_start : extra_start + extra_nbytes], problems)
        position = following


def _entry(fields: tuple[Any, ...], name: bytes, extra: bytes, problems: list[Problem]) -> Entry:
    _, made, needed, flags, method, time, date, crc32, packed, nbytes = fields[:10]
    comment_nbytes, disk, internal, external, offset = fields[12:]
    blocks = extra_blocks(extra)
    if blocks is None:
        problems.append((DIRECTORY, f"record {name!r}: its extra fields do not add up"))
    wide = next((content for kind, content in blocks or () if kind == ZIP64), b"")
    values = [value for (value,) in struct.iter_unpack("<Q", wide[: len(wide) // 8 * 8])]
    sizes = []
    for value in (nbytes, packed, offset):
        sizes.append(values.pop(0) if value == _MAX32 and values else value)
    unused = {"version made by": made, "comment": comment_nbytes, "disk": disk}
    unused |= {"internal attributes": internal, "external attributes": external}
    return Entry(
        name, needed, flags, method, time, date, crc32, sizes[1], sizes[0], sizes[2], tuple(sorted(unused.items()))
    )


def extra_blocks(extra: bytes) -> list[tuple[int, bytes]] | None:
    """The blocks of an extra field: kind and content; ``None`` where their sizes do not add up."""
    found, position = [], 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        found.append((kind, extra[position + 4 : position + 4 + nbytes]))
        position += 4 + nbytes
    return found if position == len(extra) else None


def _is_torchs(entry: Entry) -> bool:
    return _unusual(entry) == []


def _unusual(entry: Entry) -> list[str]:
    """Fields that are not as ``torch.save`` writes them, of those that it always writes alike."""
    fields = [*entry.unused, ("version needed", entry.needed), ("time", entry.time), ("date", entry.date)]
    unusual = [what for what, value in fields if value != 0]
    flags = _TORCH_FLAGS if entry.nbytes else _TORCH_FLAGS_EMPTY
    return unusual + (["flags"] if entry.flags != flags else [])


def _judged(entry: Entry, by_torch: bool) -> Iterator[Problem]:
    """What is wrong with one record, as the directory describes it."""
    if entry.method != _STORED or entry.packed_nbytes != entry.nbytes:
        yield DIRECTORY, f"record {entry.shown} is compressed, or its sizes differ: readers take its bytes as they lie"
    unusual = _unusual(entry) if by_torch else []
    if "flags" in unusual or "disk" in unusual:
        yield DIRECTORY, f"record {entry.shown}: {', '.join(unusual)} not as torch writes it"
    elif unusual:
        yield PADDING, f"record {entry.shown}: {', '.join(unusual)} not as torch writes it; no reader looks at this"
