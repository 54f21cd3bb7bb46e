"""Opcodes that torch never writes, and games with the memo, the marks and lengths: refused, each as damage of the file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from elastic_ckpt.errors import DamagedError, UnsupportedError
from tests.attacks.assembly import archive
from tests.attacks.guard import read


def number(value: int) -> bytes:
    return struct.pack("<I", value & 0xFFFFFFFF)


#: Behind ``PROTO 2``.
OPCODES: dict[str, bytes] = {
    "PUT of a negative entry": b"Np-1\n.",
    "PUT of a huge entry": b"Np" + b"9" * 5000 + b"\n.",
    "GET of a negative entry": b"g-1\n.",
    "LONG_BINPUT of the last entry": b"Nr" + number(-1) + b".",
    "LONG_BINGET of an entry that is not there": b"j" + number(-1) + b".",
    "BINGET of an entry that is not there": b"h\x05.",
    "BINGET of what was another object": b"]q\x00}q\x00h\x00a.",
    "BINPUT of nothing": b"q\x00.",
    "BINPUT of a mark": b"(q\x00.",
    "MEMOIZE of nothing": b"\x94.",
    "LONG4 of a negative length": b"\x8b" + number(-1) + b".",
    "LONG4 of 2 GiB": b"\x8b" + number((1 << 31) - 1) + b".",
    "BINUNICODE of 4 GiB": b"X" + number(-1) + b".",
    "BINUNICODE8 of 16 EiB": b"\x8d" + b"\xff" * 8 + b".",
    "BINUNICODE8 of 8 EiB": b"\x8d" + struct.pack("<Q", 1 << 63) + b".",
    "BINBYTES8 of 4 EiB": b"\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "BYTEARRAY8 of 1 TiB": b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "NEXT_BUFFER": b"\x97.",
    "READONLY_BUFFER": b"N\x98.",
    "PERSID": b"Pstorage\n.",
    "BINPERSID of nothing": b"Q.",
    "BINPERSID of an object of the memo": b"Nq\x00h\x00Q.",
    "EXT1 of no code": b"\x82\x00.",
    "EXT2": b"\x83\x01\x00.",
    "EXT4 of a negative code": b"\x84" + number(-1) + b".",
    "INST": b"(ios\nsystem\n.",
    "OBJ": b"(cos\nsystem\no.",
    "DUP": b"]2a.",
    "STRING": b"S'x'\n.",
    "SHORT_BINSTRING": b"U\x02\xff\xfe.",
    "LONG of many digits": b"L" + b"9" * 10_000 + b"L\n.",
    "INT of many digits": b"I" + b"9" * 9_000 + b"\n.",
    "FLOAT": b"Fnan\n.",
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93.",
    "STOP with nothing": b".",
    "POP of nothing": b"N00N.",
    "a tuple without a mark": b"t.",
    "an item for a tuple": b")q\x00Na.",
    "text that is none": b"X" + number(1) + b"\xff.",
    "no end": b"N",
}


@pytest.mark.parametrize("what", OPCODES)
def test_it_is_refused(tmp_path: Path, what: str) -> None:
    file, error = read(archive(tmp_path, b"\x80\x02" + OPCODES[what], bytes(16)))
    assert file is None and type(error) is DamagedError, error


def test_a_list_in_itself_is_a_limit_and_no_damage(tmp_path: Path) -> None:
    file, error = read(archive(tmp_path, b"\x80\x02]q\x00h\x00a.", bytes(16)))
    assert file is None and type(error) is UnsupportedError
