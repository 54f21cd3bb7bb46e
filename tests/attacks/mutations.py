"""Changes of files and pickles, drawn by a random generator: bits, ranges, numbers that are known to hurt, opcodes."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from random import Random

from tests.attacks.pickles import NAMES

#: Boundaries of what fields can hold.
NUMBERS = [0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 256, 1 << 15, 0xFFFE, 0xFFFF, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31]
NUMBERS += [0xFFFFFFFE, 0xFFFFFFFF, 1 << 32, 1 << 40, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
SIGNATURES = [b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"]
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def _place(random: Random, raw: bytearray) -> int:
    return random.randrange(len(raw) + 1)


def _range(random: Random, raw: bytearray) -> tuple[int, int]:
    start = _place(random, raw)
    return start, min(len(raw), start + random.choice([1, 2, 4, 8, 30, 100, len(raw)]))


def flip(random: Random, raw: bytearray) -> None:
    if raw:
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)


def overwrite(random: Random, raw: bytearray) -> None:
    start, end = _range(random, raw)
    raw[start:end] = random.randbytes(end - start)


def remove(random: Random, raw: bytearray) -> None:
    start, end = _range(random, raw)
    del raw[start:end]


def duplicate(random: Random, raw: bytearray) -> None:
    start, end = _range(random, raw)
    at = _place(random, raw)
    raw[at:at] = raw[start:end]


def splice(random: Random, raw: bytearray) -> None:
    start, end = _range(random, raw)
    at = _place(random, raw)
    raw[at : at + end - start] = raw[start:end]


def truncate(random: Random, raw: bytearray) -> None:
    del raw[_place(random, raw) :]


def number(random: Random, raw: bytearray) -> None:
    layout = random.choice(["<B", "<H", "<I", "<Q", ">Q"])
    value = random.choice(NUMBERS) & ((1 << 8 * struct.calcsize(layout)) - 1)
    at = _place(random, raw)
    raw[at : at + struct.calcsize(layout)] = struct.pack(layout, value)


def field(random: Random, raw: bytearray) -> None:
    """A number in a structure of the archive."""
    found = [at for signature in SIGNATURES if (at := raw.rfind(signature)) >= 0]
    if found:
        at = random.choice(found) + random.randrange(4, 56)
        layout = random.choice(["<H", "<I", "<Q"])
        value = random.choice([*NUMBERS, len(raw), len(raw) - 22]) & ((1 << 8 * struct.calcsize(layout)) - 1)
        raw[at : at + struct.calcsize(layout)] = struct.pack(layout, value)


def opcode(random: Random, raw: bytearray) -> None:
    at = _place(random, raw)
    raw[at : at + random.randrange(2)] = random.choice(OPCODES)


def global_name(random: Random, raw: bytearray) -> None:
    """Another function, where a pickle names one."""
    at = raw.find(b"c", _place(random, raw))
    end = raw.find(b"\n", raw.find(b"\n", at) + 1) if at >= 0 else -1
    if end >= 0:
        module, qualname = random.choice(NAMES)
        raw[at : end + 1] = f"c{module}\n{qualname}\n".encode()


BYTES: list[Callable[[Random, bytearray], None]] = [flip, overwrite, remove, duplicate, splice, truncate, number, field]
OF_PICKLES = [*BYTES[:-1], opcode, global_name]


def moved(random: Random, pickled: bytes) -> bytes:
    """The pickle with some of its opcodes left out, repeated or exchanged, each with its argument."""
    starts = [position for _, _, position in pickletools.genops(pickled)]
    ends = [*starts[1:], len(pickled)]
    parts = [pickled[start:end] for start, end in zip(starts, ends, strict=True)]
    for _ in range(random.randint(1, 4)):
        first, second = random.randrange(len(parts)), random.randrange(len(parts))
        action = random.randrange(4)
        if action == 0:
            del parts[first]
        elif action == 1:
            parts.insert(second, parts[first])
        elif action == 2:
            parts[first], parts[second] = parts[second], parts[first]
        else:
            parts[first : first + 8] = parts[second : second + 8]
    return b"".join(parts)


def mutated(random: Random, raw: bytes, changes: list[Callable[[Random, bytearray], None]]) -> bytes:
    new = bytearray(raw)
    for _ in range(random.choice([1, 1, 1, 2, 3, 8])):
        random.choice(changes)(random, new)
    return bytes(new)
