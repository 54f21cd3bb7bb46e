"""Hostile and damaged files, each under one line on what it tries."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from tests.attacks.assembly import Records, doubled, packed, records_of, storage, tensor, text, tuple_of

#: A pickle with a tensor of each of two storages.
TWO = b"\x80\x02" + tuple_of(tensor(storage("0", 4), 0, [4], [1]), tensor(storage("1", 4), 0, [4], [1])) + b"."
FIRST, SECOND = struct.pack("<4f", 1, 2, 3, 4), struct.pack("<4f", 5, 6, 7, 8)
RECORDS = records_of(TWO, FIRST, SECOND)
_ENTRY, _END = b"PK\x01\x02", b"PK\x05\x06"
#: Offsets of fields: of an entry, of the end, of a local header.
_FLAGS, _METHOD, _CRC, _PACKED, _SIZE, _NAME_NBYTES, _EXTRA_NBYTES, _COMMENT_NBYTES, _HEADER = 8, 10, 16, 20, 24, 28, 30, 32, 42  # fmt: skip
_COUNT, _DIRECTORY_NBYTES, _START = 10, 12, 16


def changed(at: Callable[[bytes], int], layout: str, value: int, raw: bytes | None = None) -> bytes:
    """The archive with another value of one field."""
    new = bytearray(packed(RECORDS) if raw is None else raw)
    struct.pack_into(layout, new, at(bytes(new)), value)
    return bytes(new)


def entry(key: str, field: int) -> Callable[[bytes], int]:
    """Offset of a field of a record's entry in the directory."""
    return lambda raw: raw.rindex(f"file/{key}".encode()) - 46 + field


def end(field: int) -> Callable[[bytes], int]:
    return lambda raw: raw.rindex(_END) + field


def header(key: str, field: int) -> Callable[[bytes], int]:
    return lambda raw: raw.index(f"file/{key}".encode()) - 30 + field


def with_wide(key: str, *values: int, fields: tuple[int, ...] = (_SIZE, _PACKED)) -> bytes:
    """The archive with a block of 64-bit values for a record's sizes or offset."""
    raw = bytearray(packed(RECORDS))
    block = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
    for field in fields:
        struct.pack_into("<I", raw, entry(key, field)(bytes(raw)), 0xFFFFFFFF)
    at = raw.rindex(f"file/{key}".encode())
    struct.pack_into("<H", raw, at - 46 + _EXTRA_NBYTES, len(block))
    raw[at + len(f"file/{key}") : at + len(f"file/{key}")] = block
    nbytes_at = end(_DIRECTORY_NBYTES)(bytes(raw))
    struct.pack_into("<I", raw, nbytes_at, struct.unpack_from("<I", raw, nbytes_at)[0] + len(block))
    return bytes(raw)


def with_wide_end(count: int, nbytes: int, start: int) -> bytes:
    """The archive with a zip64 end of its directory."""
    raw = packed(RECORDS)
    at = raw.rindex(_END)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, start)
    return raw[:at] + wide + struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1) + raw[at:]


def renamed(old: str, new: str) -> Records:
    return [(new if name == old else name, data) for name, data in RECORDS]


_RAW = packed(RECORDS)
_DIRECTORY_AT = _RAW.index(_ENTRY)
_INNER = packed([("file/data.pkl", b"\x80\x02K\x07.")])

#: What a file holds. None of them is what any writer left behind.
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "an end of a directory, and nothing else": struct.pack("<4s4H2LH", _END, 0, 0, 0, 0, 0, 0, 0),
    "an archive without a pickle": packed(RECORDS[1:]),
    "two pickles in different folders": packed([*RECORDS, ("other/data.pkl", b"\x80\x02N.")]),
    "two records of one name": packed([*RECORDS, ("file/data/0", SECOND)]),
    "two pickles of one name": packed([*RECORDS, RECORDS[0]]),
    "names that differ until they are decoded": packed([*RECORDS, ("file/data/\\xff", b"a"), ("file/data/X", b"b")]).replace(b"file/data/X", b"file/data/\xff"),
    "storages in another folder": packed([(name.replace("file/data/", "../data/"), data) for name, data in RECORDS]),
    "a storage whose name leads out of the archive": packed(renamed("file/data/0", "file/data/../../0")),
    "a storage whose name is absolute": packed(renamed("file/data/0", "/etc/passwd")),
    "an entry without a name": packed(renamed("file/data/0", "")),
    "a name of 64 KiB in a directory of less": changed(entry("data/0", _NAME_NBYTES), "<H", 0xFFFF),
    "an entry whose comment is the rest": changed(entry("data/0", _COMMENT_NBYTES), "<H", 0xFFFF),
    "an entry whose extra field is the next entry": changed(entry("data/0", _EXTRA_NBYTES), "<H", 57),
    "a record of 4 GiB": changed(entry("data/0", _SIZE), "<I", 0xFFFFFFF0, changed(entry("data/0", _PACKED), "<I", 0xFFFFFFF0)),
    "a record of 8 EiB": with_wide("data/0", 1 << 63, 1 << 63),
    "a record whose zip64 sizes are missing": with_wide("data/0"),
    "a record with half of its zip64 sizes": with_wide("data/0", 16),
    "a record that begins behind the file": with_wide("data/0", 1 << 40, fields=(_HEADER,)),
    "a record that begins at 16 EiB": with_wide("data/0", (1 << 64) - 1, fields=(_HEADER,)),
    "a pickle of 1 GiB": changed(entry("data.pkl", _SIZE), "<I", 1 << 30, changed(entry("data.pkl", _PACKED), "<I", 1 << 30)),
    "a pickle of 1 TiB": with_wide("data.pkl", 1 << 40, 1 << 40),
    "a pickle that begins behind the file": changed(entry("data.pkl", _HEADER), "<I", len(_RAW)),
    "a pickle that reaches into the next record": changed(entry("data.pkl", _SIZE), "<I", 1000, changed(entry("data.pkl", _PACKED), "<I", 1000)),
    "a compressed record": changed(entry("data/0", _METHOD), "<H", 8),
    "a compressed pickle": changed(entry("data.pkl", _METHOD), "<H", 8),
    "an encrypted pickle, 12 bytes longer": changed(entry("data.pkl", _PACKED), "<I", len(TWO) + 12),
    "a pickle of another checksum": changed(entry("data.pkl", _CRC), "<I", 1),
    "two records that begin at the same byte": changed(entry("data/1", _HEADER), "<I", _RAW.index(b"file/data/0") - 30),
    "a record that begins inside of another's data": changed(entry("data/1", _HEADER), "<I", _RAW.index(FIRST)),
    "a record whose header is of another": changed(entry("data/0", _HEADER), "<I", _RAW.index(b"file/version") - 30),
    "a record without a header": changed(entry("data/0", _HEADER), "<I", _RAW.index(FIRST) - 5),
    "a header whose extra field leads into the next record": changed(header("data.pkl", 28), "<H", 0xFFFF, changed(entry("data.pkl", _FLAGS), "<H", 0x0800)),
    "a header whose name is longer than the file": changed(header("data.pkl", 26), "<H", 0xFFFF, changed(entry("data.pkl", _FLAGS), "<H", 0x0800)),
    "one entry more than there are": changed(end(_COUNT), "<H", len(RECORDS) + 1),
    "one entry less than there are": changed(end(_COUNT), "<H", len(RECORDS) - 1),
    "65,535 entries": changed(end(_COUNT), "<H", 0xFFFF),
    "a directory of 4 GiB": changed(end(_DIRECTORY_NBYTES), "<I", 0xFFFFFFFF),
    "a directory that begins behind the file": changed(end(_START), "<I", 0xFFFFFFF0),
    "a directory that begins inside of an entry": changed(end(_START), "<I", _DIRECTORY_AT + 3),
    "a zip64 directory of 2 ** 60 entries": with_wide_end(1 << 60, len(_RAW) - _DIRECTORY_AT, _DIRECTORY_AT),
    "a zip64 directory of 16 EiB": with_wide_end(6, (1 << 64) - 1, _DIRECTORY_AT),
    "a zip64 directory that begins at 16 EiB": with_wide_end(6, 1, (1 << 64) - 1),
    "a second archive in the comment, of which only its end counts": packed(RECORDS, comment=_INNER),
    "something in front of the archive, by which all offsets are wrong": b"#!/bin/sh\n" + _RAW,
    "big-endian tensors": packed([(name, b"big" if name == "file/byteorder" else data) for name, data in RECORDS]),
    "a byte order of 64 KiB": packed([(name, b"little" * 10_000 if name == "file/byteorder" else data) for name, data in RECORDS]),
    "a storage shorter than its tensor": packed(records_of(TWO, FIRST, SECOND[:8])),
    "an archive in Python's own pickle format": pickle.dumps({"weight": [1, 2, 3]}, 2),
}  # fmt: skip

_LEGACY_TWO = b"\x80\x02" + tuple_of(tensor(storage("1", 4), 0, [4], [1]), tensor(storage("2", 4), 0, [4], [1])) + b"."
_LEGACY_DATA = struct.pack("<Q", 4) + FIRST + struct.pack("<Q", 4) + SECOND
#: The same storage twice, first with a size that is not in the file.
_LARGE = b"\x80\x02" + tuple_of(tensor(storage("1", 1 << 50), 1 << 49, [4], [1]), storage("1", 4)) + b"."
_WIDE = b"\x80\x02" + tuple_of(tensor(storage("1", 4, "DoubleStorage"), 0, [4], [1]), storage("1", 4)) + b"."


def listed(*keys: object) -> bytes:
    return pickle.dumps([*keys], 2)


#: Legacy archives: the pickle, that of the keys, and the storages.
LEGACY: dict[str, tuple[bytes, bytes, bytes]] = {
    "a key more than there are storages": (_LEGACY_TWO, listed("1", "2", "3"), _LEGACY_DATA + struct.pack("<Q", 0)),
    "a key less than there are storages": (_LEGACY_TWO, listed("1"), _LEGACY_DATA),
    "a key twice": (_LEGACY_TWO, listed("1", "2", "1"), _LEGACY_DATA + struct.pack("<Q", 4) + SECOND),
    "keys that are numbers": (_LEGACY_TWO, listed(1, 2), _LEGACY_DATA),
    "keys that cannot be hashed": (_LEGACY_TWO, listed([], {}), _LEGACY_DATA),
    "keys that take 2 ** 60 steps to hash": (_LEGACY_TWO, b"\x80\x02](" + doubled(60) * 2 + b"e.", b""),
    "keys that are no list": (_LEGACY_TWO, pickle.dumps({"1": 1, "2": 2}, 2), _LEGACY_DATA),
    "a storage of another size than its tensors need": (_LEGACY_TWO, listed("1", "2"), struct.pack("<Q", 5) + _LEGACY_DATA[8:]),
    "a storage of 16 EiB": (_LEGACY_TWO, listed("1", "2"), b"\xff" * 8 + _LEGACY_DATA[8:]),
    "storages that end before the file does": (_LEGACY_TWO, listed("1", "2"), _LEGACY_DATA[:-1]),
    "no storages": (_LEGACY_TWO, listed("1", "2"), b""),
    "a storage that is large the first time and small the second": (_LARGE, listed("1"), struct.pack("<Q", 4) + FIRST),
    "a storage of two dtypes": (_WIDE, listed("1"), struct.pack("<Q", 4) + FIRST),
    "a storage that is a view, as torch wrote them before 0.4": (b"\x80\x02(" + storage("1", 4)[1:-2] + tuple_of(text("v"), b"K\0", b"K\1") + b"tQ.", listed("1"), _LEGACY_DATA),
    "a pickle without an end": (_LEGACY_TWO[:-1], b"", b""),
}  # fmt: skip


def files(folder: Path) -> dict[str, str]:
    """Paths of what is no ordinary file."""
    os.mkfifo(folder / "fifo.pt")
    (folder / "folder.pt").mkdir()
    (folder / "loop.pt").symlink_to(folder / "loop.pt")
    (folder / "nowhere.pt").symlink_to(folder / "not there")
    (folder / "pipe.pt").symlink_to(folder / "fifo.pt")
    (folder / "zero.pt").symlink_to("/dev/zero")
    kinds = {"fifo": "a FIFO", "folder": "a folder", "loop": "a link to itself", "nowhere": "a link to nothing"}
    kinds |= {"pipe": "a link to a FIFO", "zero": "a link to a device without an end"}
    return {what: str(folder / f"{name}.pt") for name, what in kinds.items()} | {
        "a name with a zero byte": f"{folder}/a\0b.pt",
        "a name of 10,000 characters": f"{folder}/{'a' * 10_000}.pt",
    }
