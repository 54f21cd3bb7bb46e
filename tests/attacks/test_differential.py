"""Our interpreter beside CPython's: what that would import of a pickle is what ours would, or ours refuses.

Nothing here depends on it, since no file is read by both. It is the measure of how well ours knows the format.
``ELASTIC_CKPT_FUZZ`` is the number of mutated files of a run, of which there are a fourth as many streams here;
``python -m tests.attacks.test_differential COUNT SEED`` tries as many as one likes.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from elastic_ckpt.errors import UnsafePickleError
from elastic_ckpt.formats.torch_archive.calls import Global
from elastic_ckpt.formats.torch_archive.unpickler import _OPERATIONS, Unpickler
from tests.attacks.assembly import call, get, name, number, put, stacked, text, tuple_of
from tests.attacks.mutations import OF_PICKLES, moved, mutated

PICKLES = int(os.environ.get("ELASTIC_CKPT_FUZZ", "20000")) // 4
#: Imported names, one list for each load of a stream.
Names = list[tuple[str, str]]


def translated(module: str, qualname: str) -> tuple[str, str]:
    """A name of Python 3, if it was one of Python 2: an overridden ``find_class`` is given the old one."""
    module, qualname = NAME_MAPPING.get((module, qualname), (module, qualname))
    return IMPORT_MAPPING.get(module, module), qualname


class Anything:
    """What a recording ``find_class`` gives for every name: it can be called, filled, and given a state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Anything:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any) -> Anything:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def add(self, item: Any) -> None: ...


class Recording(pickle.Unpickler):
    """CPython's unpickler in C, which imports nothing."""

    def __init__(self, stream: Any, names: Names) -> None:
        super().__init__(stream)
        self._names = names

    def find_class(self, module: str, qualname: str) -> Any:
        self._names.append(translated(module, qualname))
        return Anything

    def persistent_load(self, _persistent_id: Any) -> Any:
        return Anything()


class WithoutPeek:
    """A stream that has no ``peek`` and no buffer, as torch wraps some."""

    def __init__(self, raw: bytes) -> None:
        self._stream = io.BytesIO(raw)

    def read(self, nbytes: int = -1) -> bytes:
        return self._stream.read(nbytes)

    def readline(self) -> bytes:
        return self._stream.readline()

    def readinto(self, buffer: Any) -> int:
        return self._stream.readinto(buffer)


def buffered(raw: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(raw), buffer_size=64)  # type: ignore[arg-type]


#: The streams of which torch's loader reads.
STREAMS: dict[str, Callable[[bytes], Any]] = {"BytesIO": io.BytesIO, "BufferedReader": buffered, "no peek": WithoutPeek}


def of_cpython(raw: bytes, open_stream: Callable[[bytes], Any], loads: int) -> list[Names]:
    """What is imported by each of some loads, one after another, until one fails."""
    stream, every = open_stream(raw), list[Names]()
    for _ in range(loads):
        names: Names = []
        every.append(names)
        try:
            Recording(stream, names).load()
        except Exception:
            break
    return every


def of_ours(raw: bytes, loads: int) -> list[Names] | None:
    """What ours asks for; ``None`` where it refuses the stream."""
    at, every = 0, list[Names]()

    for _ in range(loads):
        names: Names = []
        every.append(names)

        def find(module: str, qualname: str, names: Names = names) -> Global:
            names.append(translated(module, qualname))
            return Global(f"{module}.{qualname}", error=UnsafePickleError("of the test", found=qualname))

        machine = Unpickler(raw, find, lambda _id: Global("storage"), at, len(raw), (UnsafePickleError,))
        try:
            machine.run()
        except Exception:
            return None
        at = machine.at
    return every


def difference(raw: bytes, loads: int) -> str | None:
    """Where CPython would import what ours has not seen, of a stream that ours reads to its end."""
    ours = of_ours(raw, loads)
    if ours is None:
        return None
    seen = [set(names) for names in ours]
    for kind, open_stream in STREAMS.items():
        for position, names in enumerate(of_cpython(raw, open_stream, loads)):
            if not set(names) <= seen[position]:
                return f"{kind}, load {position}: {names} instead of {ours[position]} of {raw!r}"
    return None


EVIL = (name("os", "system"), stacked("posix", "system"), name("__builtin__", "eval"), b"cbuiltins\nexec\n")


def frame(nbytes: int) -> bytes:
    return pickle.FRAME + struct.pack("<Q", nbytes)


def smuggled(random: Random) -> bytes:
    """Opcodes where an interpreter expects data: it must agree with the other one on where the data ends."""
    hidden = (
        random.choice(EVIL) + random.choice([b"", b")R", text("x") + b"\x85R"]) + random.choice([b".", b"0", b"N."])
    )
    nbytes = random.choice([len(hidden), len(hidden) + 1, max(len(hidden) - 3, 0), random.randrange(40)])
    head = random.choice(
        [
            *(b"X" + struct.pack("<I", nbytes), b"\x8c" + bytes([nbytes & 255]), b"C" + bytes([nbytes & 255])),
            *(
                b"\x8d" + struct.pack("<Q", nbytes),
                b"B" + struct.pack("<I", nbytes),
                b"\x8e" + struct.pack("<Q", nbytes),
            ),
            *(
                b"\x96" + struct.pack("<Q", nbytes),
                b"\x8a" + bytes([nbytes & 255]),
                b"\x8b" + struct.pack("<I", nbytes),
            ),
            *(frame(nbytes), frame(nbytes + 9), frame(random.choice([0, 1, 4, 1 << 17, 1 << 18]))),
            *(b"T" + struct.pack("<I", nbytes), b"U" + bytes([nbytes & 255]), b"c", b"i", b"V", b"S'", b"I", b"P"),
        ]
    )
    return head + hidden


#: Parts of pickles: values, containers, marks, the memo, calls, states.
PARTS = [
    *(
        b"N",
        b"\x88",
        b"K\x07",
        b"M\x01\x02",
        b"J\xff\xff\xff\xff",
        b"G" + bytes(8),
        text("key"),
        b"\x8c\x01a",
        b"C\x02ab",
    ),
    *(
        b")",
        b"]",
        b"}",
        b"\x8f",
        b"(",
        b"(",
        b"t",
        b"l",
        b"d",
        b"e",
        b"u",
        b"\x90",
        b"\x91",
        b"a",
        b"s",
        b"\x85",
        b"\x86",
        b"\x87",
    ),
    *(b"q\x00", b"q\x01", b"h\x00", b"h\x01", put(2), get(2), put(300), b"\x94", b"\x94", b"0", b"1", b"2", b"."),
    *(
        name("collections", "OrderedDict") + b")R",
        name("torch", "Size"),
        stacked("a", "b"),
        text("m") + text("n") + b"\x93",
    ),
    *(b"R", b"\x81", b"\x92", b"o", b"b", b"Q", b"\x80\x02", b"\x80\x04", b"\x80\x05", b"\x82\xf0", b"\x97", b"\x98"),
    *(call(name("builtins", "set"), b"]"), tuple_of(number(1), text("two")), number(1 << 70)),
]


def framed(random: Random, body: bytes) -> bytes:
    """A pickle of protocol 4 with a frame that begins and ends anywhere, or where it should."""
    start = random.choice([0, 0, random.randrange(len(body) + 1)])
    exact = len(body) - start
    nbytes = random.choice(
        [exact, exact, exact + 1, exact - 1, random.randrange(exact + 40), 1 << 17, (1 << 17) + exact]
    )
    nbytes = max(nbytes, 0)
    padding = bytes(random.choice([0, 0, 7, nbytes]) if random.random() < 0.2 else 0)
    return b"\x80\x04" + body[:start] + frame(nbytes) + body[start:] + padding


def sound(random: Random, depth: int = 3) -> list[bytes]:
    """Opcodes, each with its argument, that push one object."""
    way = random.randrange(9) if depth else random.randrange(3)
    if way == 0:
        return [random.choice(PARTS[:9])]
    if way == 1:
        return [
            random.choice(
                [*EVIL[:1], name("collections", "OrderedDict"), name("copy_reg", "_reconstructor"), b"ca\nb\n"]
            )
        ]
    if way == 2:
        return [text("m"), text(random.choice("xyz")), b"\x93"]
    below = [part for _ in range(random.randrange(3)) for part in sound(random, depth - 1)]
    return {
        3: lambda: [b"(", *below, b"t"],
        4: lambda: [b"]", b"(", *below, b"e"],
        5: lambda: [name("m", "f"), b"(", *below, b"t", b"R"],
        6: lambda: [name("m", "C"), b"(", *below, b"t", b"\x81", *random.choice([[], [b"}", b"b"]])],
        7: lambda: [*sound(random, depth - 1), random.choice([b"\x94", b"q\x05", put(6)])],
        8: lambda: [*sound(random, depth - 1), b"0", *sound(random, depth - 1)],
    }[way]()


def in_frames(random: Random, parts: list[bytes]) -> bytes:
    """A pickle of protocol 4 in frames of whole opcodes, one of which may have another length."""
    raw, at = b"\x80\x04", 0
    while at < len(parts):
        body = b"".join(parts[at : at + random.randrange(1, 9)])
        taken = at
        while taken < len(parts) and sum(map(len, parts[at:taken])) < len(body):
            taken += 1
        at = taken
        off = random.choice([0] * 30 + [1, -1, 7, 1 << 17])
        raw += frame(max(len(body) + off, 0)) + body if random.random() < 0.7 else body
    return raw


def drawn(random: Random, seeds: list[bytes]) -> bytes:
    """A pickle, most of them broken somewhere."""
    way = random.randrange(9)
    if way > 5:  # most of them sound
        parts = [*sound(random), b"."]
        if random.random() < 0.3:
            parts.insert(random.randrange(len(parts)), smuggled(random))
        return in_frames(random, parts) if random.random() < 0.7 else b"\x80\x02" + b"".join(parts)
    if way == 0:
        return mutated(random, random.choice(seeds), OF_PICKLES)
    if way == 1:
        return moved(random, random.choice(seeds))
    parts = [
        random.choice(PARTS) if random.random() < 0.85 else smuggled(random) for _ in range(random.randrange(1, 14))
    ]
    body = b"".join(parts) + random.choice([b".", b".", b"", random.choice(EVIL) + b"."])
    if way == 2:
        return random.choice([b"", b"\x80\x02", b"\x80\x03"]) + body
    if way == 3:  # inside a pickle that is sound, before its end
        seed = random.choice(seeds)
        return seed[:-1] + body
    return framed(random, body)


def seeds() -> list[bytes]:
    """Sound pickles of every protocol, with frames and objects larger than one."""
    trees: list[Any] = [
        {"a": [1, (2.5, "x")]},
        {1, "b"},
        OrderedDict(a=b"raw" * 30),
        [Counter("aab"), bytearray(b"xy")],
    ]
    trees += [{"long": "x" * 70_000, "more": [b"y" * 66_000, 3]}, [{}, {}, [[]], frozenset({1, (2, 3)})]]
    return [pickle.dumps(tree, protocol) for tree in trees for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]


def differences(count: int, seed: int) -> Iterator[str]:
    """Differences in so many streams of one to three pickles."""
    random, sound = Random(seed), seeds()
    for _ in range(count):
        loads = random.choice([1, 1, 2, 3])
        raw = b"".join(drawn(random, sound) for _ in range(loads))
        if (found := difference(raw, loads)) is not None:
            yield found


def test_cpython_would_import_nothing_that_ours_has_not_seen() -> None:
    assert list(differences(PICKLES, seed=11)) == []


def test_sound_pickles_are_read_by_both() -> None:
    for raw in seeds():
        ours = of_ours(raw + raw, 2)
        assert ours is not None and ours == of_cpython(raw + raw, io.BytesIO, 2)


def test_the_comparison_sees_what_a_frame_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of an interpreter that passes over the length of a frame, the streams above show differences."""
    monkeypatch.setitem(_OPERATIONS, pickle.FRAME[0], lambda machine: machine.take(8))
    assert next(differences(PICKLES, seed=11), None) is not None


if __name__ == "__main__":
    count, found = int(sys.argv[1]), list(differences(int(sys.argv[1]), int(sys.argv[2])))
    print(f"Python {sys.version.split()[0]}: {count} streams, {len(found)} differences", *found[:5], sep="\n")
    sys.exit(bool(found))
