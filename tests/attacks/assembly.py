"""Builds pickles opcode by opcode, and the archives around them."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

Records = list[tuple[str, bytes]]


def name(module: str, qualname: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{qualname}\n".encode()


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def stacked(module: str, qualname: str) -> bytes:
    """STACK_GLOBAL."""
    return text(module) + text(qualname) + b"\x93"


def number(value: int) -> bytes:
    """The shortest opcode of protocol 2 for an integer."""
    return pickle.dumps(value, 2)[2:-1]


def put(index: int) -> bytes:
    """LONG_BINPUT."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """LONG_BINGET."""
    return b"j" + struct.pack("<I", index)


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    """REDUCE."""
    return function + tuple_of(*arguments) + b"R"


def storage(key: str, numel: int, kind: str = "FloatStorage") -> bytes:
    return tuple_of(text("storage"), name("torch", kind), text(key), text("cpu"), number(numel)) + b"Q"


def tensor(where: bytes, offset: int, size: Iterable[int], stride: Iterable[int], *more: bytes) -> bytes:
    sizes, strides = tuple_of(*map(number, size)), tuple_of(*map(number, stride))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, where, number(offset), sizes, strides, b"\x89", b"}", *more)


def doubled(levels: int, bottom: bytes = b")") -> bytes:
    """A tuple that has the one below it twice, ``levels`` times: exponential for whoever walks through it."""
    build = b"".join(get(level) + get(level) + b"\x86" + put(level + 1) for level in range(levels))
    return b"(" + bottom + put(0) + build + b"t"


def packed(records: Records, comment: bytes = b"") -> bytes:
    """A zip archive as torch writes it: uncompressed, data at multiples of 64, sizes behind it and in the directory."""
    raw, directory = bytearray(), bytearray()
    for path, data in records:
        label, header, crc = path.encode(errors="surrogateescape"), len(raw), zlib.crc32(data)
        padding = -(header + 30 + len(label) + 4) % 64
        raw += struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(label), 4 + padding)
        raw += label + struct.pack("<2H", 0x4246, padding) + b"Z" * padding + data
        raw += struct.pack("<4s3L", b"PK\x07\x08", crc, len(data), len(data))
        fields = (crc, len(data), len(data), len(label), 0, 0, 0, 0, 0, header)
        directory += struct.pack("<4s4B4H3L5H2L", b"PK\x01\x02", 0, 0, 0, 0, 0x0808, 0, 0, 0, *fields) + label
    end = (0, 0, len(records), len(records), len(directory), len(raw), len(comment))
    return bytes(raw + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", *end) + comment)


def records_of(pickled: bytes, *storages: bytes) -> Records:
    """The records of a ``torch.save`` archive."""
    data = [(f"file/data/{key}", raw) for key, raw in enumerate(storages)]
    return [("file/data.pkl", pickled), ("file/byteorder", b"little"), *data, ("file/version", b"3\n")]


def archive(folder: Path, pickled: bytes, *storages: bytes) -> str:
    """The path of an archive around a pickle."""
    path = folder / "file.pt"
    path.write_bytes(packed(records_of(pickled, *storages)))
    return str(path)


LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03." + pickle.dumps(
    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}, 2
)


def legacy(folder: Path, pickled: bytes, keys: bytes, storages: bytes = b"") -> str:
    """The path of a legacy archive around two pickles and what follows."""
    path = folder / "legacy.pt"
    path.write_bytes(LEGACY_START + pickled + keys + storages)
    return str(path)
